//! `_core.Accumulator`.

use std::sync::{Mutex, PoisonError};

use gradacc::{
    Added, DType, Error, GradientAccumulator, OnMissing, OnNonFinite, ParamId, ParamSpec, Reduction, Store,
    TensorError, TensorView, Weight,
};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyDict, PyList, PyMapping, PySequence, PyTuple};

use crate::errors;
use crate::gradients::Gradients;
use crate::source::Batch;
use crate::vetting::{Numbers, Vetted, len_bytes};

/// Adds of fewer bytes than this keep the GIL. Measured: releasing it and getting it back takes 80 ns, such an add no
/// more than 2.5 µs.
const KEEPS_THE_GIL: usize = 1 << 16;

/// The engine's accumulator, and the ids that Python knows its parameters by.
///
/// One lock. It is never held while Python code runs, and waited for only without the GIL.
#[pyclass(frozen, module = "gradacc._core")]
pub(crate) struct Accumulator {
    engine: Mutex<GradientAccumulator>,
    /// In layout order.
    ids: Py<PyList>,
    /// From id to number in the layout.
    numbers: Py<PyDict>,
    /// Held while a parameter is registered here and in the engine, so that both number it alike.
    registering: Mutex<()>,
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

/// What is known of the last micro-batch: `finite`, and `norm` if `micro_norms` asked for it.
#[pyclass(frozen, get_all, module = "gradacc._core")]
pub(crate) struct Last {
    finite: bool,
    norm: Option<f64>,
}

#[pymethods]
impl Last {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (finite, norm) = (self.finite.into_pyobject(py)?.repr()?, self.norm.into_pyobject(py)?.repr()?);
        Ok(format!("Last(finite={finite}, norm={norm})"))
    }
}

fn choose<T: Copy>(name: &'static str, options: &[(&str, T)], given: &str) -> Result<T, Error> {
    options.iter().find(|(option, _)| *option == given).map(|&(_, value)| value).ok_or_else(|| {
        let known: Vec<_> = options.iter().map(|(option, _)| format!("{option:?}")).collect();
        Error::Argument { name, reason: format!("expected {}, got {given:?}", known.join(" or ")) }
    })
}

#[pymethods]
impl Accumulator {
    #[new]
    #[pyo3(signature = (params, *, every, reduction, dtype, on_nonfinite, on_missing, micro_norms))]
    #[expect(clippy::too_many_arguments, reason = "one for each of the public constructor's")]
    fn new(
        py: Python<'_>,
        params: Vec<(Bound<'_, PyAny>, Vec<usize>, String)>,
        every: Option<u64>,
        reduction: &str,
        dtype: Option<&str>,
        on_nonfinite: &str,
        on_missing: &str,
        micro_norms: bool,
    ) -> PyResult<Self> {
        let build = || {
            let mut builder = GradientAccumulator::builder()
                .reduction(choose("reduction", &[("mean", Reduction::Mean), ("sum", Reduction::Sum)], reduction)?)
                .on_nonfinite(choose(
                    "on_nonfinite",
                    &[
                        ("propagate", OnNonFinite::Propagate),
                        ("raise", OnNonFinite::Raise),
                        ("skip", OnNonFinite::Skip),
                    ],
                    on_nonfinite,
                )?)
                .on_missing(choose(
                    "on_missing",
                    &[("ignore", OnMissing::Ignore), ("error", OnMissing::Error)],
                    on_missing,
                )?)
                .micro_norms(micro_norms);
            if let Some(every) = every {
                builder = builder.every(every);
            }
            if let Some(dtype) = dtype {
                let reason = |reason: TensorError| Error::Argument { name: "dtype", reason: reason.to_string() };
                builder = builder.dtype(dtype.parse().map_err(reason)?);
            }
            builder.build()
        };
        let accumulator = Self {
            engine: Mutex::new(build().map_err(|error| errors::raise(py, error))?),
            ids: PyList::empty(py).unbind(),
            numbers: PyDict::new(py).unbind(),
            registering: Mutex::default(),
            seen_before: Mutex::default(),
        };
        for (id, shape, dtype) in params {
            accumulator.register(py, &id, shape, &dtype)?;
        }
        Ok(accumulator)
    }

    fn register(&self, py: Python<'_>, id: &Bound<'_, PyAny>, shape: Vec<usize>, dtype: &str) -> PyResult<()> {
        let (ids, numbers) = (self.ids.bind(py), self.numbers.bind(py));
        let _registering = self.registering.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        if numbers.contains(id)? {
            return Err(errors::raise(py, Error::DuplicateParameter { parameter: errors::name(id) }));
        }
        let name = errors::name(id);
        let number = self.locked(py, |engine| {
            let number = engine.store().layout().len();
            engine.register(spec(number as u64, name, shape, dtype)?)
        })?;
        ids.append(id)?;
        numbers.set_item(id, number)
    }

    #[pyo3(signature = (grads, weight, scale))]
    fn add(
        &self,
        py: Python<'_>,
        grads: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        scale: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let weight = self.weight(py, weight, scale)?;
        let lock = || self.seen_before.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen_before = std::mem::take(&mut *lock());
        let added = self.add_weighted(grads, weight, &mut seen_before);
        // What it replaces, of another thread, is dropped after the lock.
        let _other = std::mem::replace(&mut *lock(), seen_before);
        Ok(added?.is_complete())
    }

    fn take(&self, py: Python<'_>) -> PyResult<Gradients> {
        let gradients = self.locked(py, GradientAccumulator::take)?;
        Gradients::new(gradients, self.ids.bind(py))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.locked(py, |engine| {
            engine.reset();
            Ok(())
        })
    }

    #[getter]
    fn ids(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.ids.bind(py).get_slice(0, usize::MAX).into_any().unbind())
    }

    #[getter]
    fn count(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.count()))
    }

    #[getter]
    #[pyo3(name = "weight")]
    fn weight_so_far(&self, py: Python<'_>) -> PyResult<f64> {
        self.locked(py, |engine| Ok(engine.weight()))
    }

    #[getter]
    fn rejected(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.rejected()))
    }

    #[getter]
    fn complete(&self, py: Python<'_>) -> PyResult<bool> {
        self.locked(py, |engine| Ok(engine.is_complete()))
    }

    #[getter]
    fn window(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.window()))
    }

    #[getter]
    fn every(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.locked(py, |engine| Ok(engine.every()))
    }

    #[getter]
    fn last(&self, py: Python<'_>) -> PyResult<Option<Last>> {
        let last = self.locked(py, |engine| Ok(engine.last()))?;
        Ok(last.map(|last| Last { finite: last.finite, norm: last.norm }))
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.locked(py, |engine| Ok(engine.store().layout().len_bytes()))
    }

    #[getter]
    fn mapped_buffers(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.store().mapped_buffers()))
    }
}

impl Accumulator {
    /// Runs the engine with its lock held and without the GIL.
    fn locked<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut GradientAccumulator) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let result = py.detach(|| {
            // After a panic, a bug of the engine, the window is what it was left as.
            work(&mut self.engine.lock().unwrap_or_else(PoisonError::into_inner))
        });
        result.map_err(|error| errors::raise(py, error))
    }

    fn weight(&self, py: Python<'_>, weight: &Bound<'_, PyAny>, scale: Option<&Bound<'_, PyAny>>) -> PyResult<Weight> {
        let (weight, scale) = (weight.extract()?, scale.map(|scale| scale.extract()).transpose()?);
        let weight = Weight::new(weight).and_then(|weight| scale.map_or(Ok(weight), |scale| weight.with_scale(scale)));
        weight.map_err(|error| errors::raise(py, error))
    }

    fn add_weighted(&self, grads: &Bound<'_, PyAny>, weight: Weight, seen_before: &mut SeenBefore) -> PyResult<Added> {
        let py = grads.py();
        let (tensors, numbers) = self.numbered(grads, &mut seen_before.keys)?;
        if let Some(vetted) = seen_before.vetted.as_mut()
            && vetted.admit(&tensors, &numbers)
        {
            seen_before.misses = 0;
            let len_bytes = vetted.len_bytes();
            return self.add_views(py, vetted.views(), len_bytes, weight);
        }
        let mut batch = Batch::with_capacity(numbers.len());
        for (tensor, number) in tensors.iter().zip(numbers.iter()) {
            batch.push(number, &tensor, &self.ids.bind(py).get_item(number)?)?;
        }
        seen_before.misses = seen_before.misses.saturating_add(1);
        if seen_before.misses.is_power_of_two() {
            seen_before.vetted = Vetted::new(&tensors, &numbers, batch.views());
        }
        let len_bytes = len_bytes(batch.views());
        self.add_views(py, batch.views(), len_bytes, weight)
    }

    fn add_views(
        &self,
        py: Python<'_>,
        views: &mut [(usize, TensorView<'_>)],
        len_bytes: usize,
        weight: Weight,
    ) -> PyResult<Added> {
        match self.engine.try_lock() {
            Ok(mut engine) if len_bytes < KEEPS_THE_GIL => {
                engine.add_batch(views, weight).map_err(|error| errors::raise(py, error))
            }
            attempt => {
                drop(attempt);
                self.locked(py, |engine| engine.add_batch(views, weight))
            }
        }
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
            let (expected, got) = (self.ids.bind(py).len(), tensors.len());
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
        let len = grads.len().unwrap_or(0);
        let (mut tensors, mut numbers) = (Vec::with_capacity(len), Vec::with_capacity(len));
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

/// A parameter's shape and dtype, by the dtype's name.
fn spec(id: u64, name: String, shape: Vec<usize>, dtype: &str) -> Result<ParamSpec, Error> {
    let dtype: DType = dtype.parse().map_err(|reason: TensorError| reason.of(&name))?;
    Ok(ParamSpec { id: ParamId(id), name, shape: shape.into(), dtype })
}
