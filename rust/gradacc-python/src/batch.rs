//! The gradients of a micro-batch as Python gives them: ids and tensors, or tensors in layout order.

use std::sync::{Mutex, PoisonError};

use gradacc::Error;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping, PySequence, PyTuple};

use crate::errors;
use crate::source::{Backend, Batch};
use crate::store::Tensor;
use crate::vetting::{Numbers, Vetted, len_bytes};

/// The ids that Python knows parameters by.
pub(crate) struct Ids {
    /// In layout order.
    pub(crate) list: Py<PyList>,
    /// From id to number in the layout.
    pub(crate) numbers: Py<PyDict>,
    backend: Backend,
    /// Taken out while it is used, so that no lock is held while Python code runs.
    seen_before: Mutex<SeenBefore>,
}

/// What the last micro-batch was like: the next is most often the same.
#[derive(Default)]
struct SeenBefore {
    /// Keys of a mapping in its order, each with its number.
    keys: Vec<(Py<PyAny>, usize)>,
    vetted: Option<Vetted>,
    /// How often vetting was in vain since it last was not. It is tried again ever less often.
    misses: u32,
}

impl Ids {
    pub(crate) fn new(py: Python<'_>, backend: Backend) -> Self {
        let (list, numbers) = (PyList::empty(py).unbind(), PyDict::new(py).unbind());
        Self { list, numbers, backend, seen_before: Mutex::default() }
    }

    /// Whether all sums are the engine's, in host memory.
    pub(crate) fn is_for_host(&self) -> bool {
        matches!(self.backend, Backend::Engine | Backend::Host)
    }

    /// Looks at gradients, and calls `work` with them by number and with the bytes they have. They stay alive until it
    /// returns.
    pub(crate) fn with_tensors<R>(
        &self,
        grads: &Bound<'_, PyAny>,
        work: impl FnOnce(&mut [(usize, Tensor<'_>)], usize) -> PyResult<R>,
    ) -> PyResult<R> {
        let lock = || self.seen_before.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen_before = std::mem::take(&mut *lock());
        let result = self.look_at(grads, &mut seen_before, work);
        // What it replaces, of another thread, is dropped after the lock.
        let _other = std::mem::replace(&mut *lock(), seen_before);
        result
    }

    fn look_at<R>(
        &self,
        grads: &Bound<'_, PyAny>,
        seen_before: &mut SeenBefore,
        work: impl FnOnce(&mut [(usize, Tensor<'_>)], usize) -> PyResult<R>,
    ) -> PyResult<R> {
        let py = grads.py();
        let (tensors, numbers) = self.numbered(grads, &mut seen_before.keys)?;
        if let Some(vetted) = seen_before.vetted.as_mut()
            && vetted.admit(&tensors, &numbers)
        {
            seen_before.misses = 0;
            let len_bytes = vetted.len_bytes();
            return work(vetted.tensors(), len_bytes);
        }
        let mut batch = Batch::with_capacity(numbers.len(), self.backend);
        for (tensor, number) in tensors.iter().zip(numbers.iter()) {
            batch.push(number, &tensor, &self.list.bind(py).get_item(number)?)?;
        }
        let mut batch = batch.look()?;
        let len_bytes = len_bytes(batch.tensors());
        let result = work(batch.tensors(), len_bytes);
        seen_before.misses = seen_before.misses.saturating_add(1);
        if seen_before.misses.is_power_of_two() {
            seen_before.vetted = Vetted::new(&tensors, &numbers, batch.tensors());
        }
        result
    }

    /// The tensors of a mapping or a sequence, without those that are None, and their numbers. `keys` are those of the
    /// last mapping, in its order; where they are equal, nothing is hashed and looked up.
    fn numbered<'py>(
        &self,
        grads: &Bound<'py, PyAny>,
        keys: &mut Vec<(Py<PyAny>, usize)>,
    ) -> PyResult<(Bound<'py, PyTuple>, Numbers)> {
        let py = grads.py();
        if grads.is_instance_of::<PyList>() || grads.is_instance_of::<PyTuple>() {
            let tensors = grads.cast::<PySequence>()?.to_tuple()?;
            let (expected, got) = (self.list.bind(py).len(), tensors.len());
            if expected != got {
                return Err(errors::raise(py, Error::SequenceLength { expected, got }));
            }
            if !tensors.iter_borrowed().any(|tensor| tensor.is_none()) {
                return Ok((tensors, Numbers::All(got)));
            }
            let (numbers, present): (Vec<_>, Vec<_>) =
                tensors.iter().enumerate().filter(|(_, tensor)| !tensor.is_none()).unzip();
            return Ok((PyTuple::new(py, present)?, Numbers::Some(numbers)));
        }
        // No more than there are parameters, whatever length an object claims to have.
        let capacity = self.list.bind(py).len();
        let (mut tensors, mut numbers) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
        let mut push = |id: &Bound<'py, PyAny>, place: usize, tensor: Bound<'py, PyAny>| -> PyResult<()> {
            let number = match keys.get(place) {
                Some((key, number)) if key.is(id) || key.bind(py).eq(id)? => *number,
                _ => {
                    let number = self.numbers.bind(py).get_item(id)?;
                    let unknown = || errors::raise(py, Error::UnknownParameter { parameter: errors::name(id) });
                    let number = number.ok_or_else(unknown)?.extract()?;
                    keys.truncate(place);
                    keys.push((id.clone().unbind(), number));
                    number
                }
            };
            if !tensor.is_none() {
                tensors.push(tensor);
                numbers.push(number);
            }
            Ok(())
        };
        if let Ok(mapping) = grads.cast_exact::<PyDict>() {
            for (place, (id, tensor)) in mapping.iter().enumerate() {
                push(&id, place, tensor)?;
            }
        } else if grads.cast::<PyMapping>().is_ok() {
            for (place, item) in grads.call_method0(intern!(py, "items"))?.try_iter()?.enumerate() {
                let (id, tensor) = item?.extract()?;
                push(&id, place, tensor)?;
            }
        } else {
            return Err(PyTypeError::new_err(format!(
                "grads: expected a mapping from id to gradient, a list or tuple of gradients in layout order, or a \
                 module, got {}",
                errors::type_name(grads)
            )));
        }
        Ok((PyTuple::new(py, tensors)?, Numbers::Some(numbers)))
    }
}
