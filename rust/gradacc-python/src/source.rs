//! Gradients as Python gives them: NumPy arrays, DLPack capsules, and whatever makes such.

use std::sync::{Mutex, PoisonError};

use gradacc::dlpack::abi::DLTensor;
use gradacc::dlpack::{self, Imported};
use gradacc::{TensorError, TensorView};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyCapsule, PyType};
use pyo3::{ffi, intern};

use crate::capsule::{self, Describe};
use crate::{errors, numpy, sparse};

/// The gradients of a micro-batch by their parameters' numbers, and what keeps their memory alive. Copies nothing.
pub(crate) struct Batch {
    /// Their lifetime is in truth that of the owners: they are lent out, and nobody clones them.
    views: Vec<(usize, TensorView<'static>)>,
    owners: Vec<Owner>,
    last: Option<(*mut ffi::PyTypeObject, Way)>,
}

#[expect(dead_code, reason = "held, not read")]
enum Owner {
    Object(Py<PyAny>),
    Tensor(Imported),
}

impl Batch {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self { views: Vec::with_capacity(capacity), owners: Vec::with_capacity(capacity), last: None }
    }

    /// Looks at one more gradient. `id` is for messages.
    pub(crate) fn push(&mut self, number: usize, object: &Bound<'_, PyAny>, id: &Bound<'_, PyAny>) -> PyResult<()> {
        let class = object.get_type_ptr();
        let way = match self.last {
            Some((last, way)) if last == class => way,
            _ => Way::of(&object.get_type())?,
        };
        self.last = Some((class, way));
        let (view, owner) = way.import(object, id)?;
        self.views.push((number, view));
        self.owners.push(owner);
        Ok(())
    }

    /// The gradients, for as long as the batch is there.
    pub(crate) fn views(&mut self) -> &mut [(usize, TensorView<'static>)] {
        &mut self.views
    }
}

/// How tensors of a type are looked at.
#[derive(Clone, Copy)]
enum Way {
    Numpy,
    Capsule,
    /// By DLPack's C table, or by `__dlpack__`; and whether the type is one of torch.
    DLPack {
        describe: Option<Describe>,
        is_torch: bool,
    },
}

impl Way {
    /// Remembers the answer, and the type, for good.
    fn of(class: &Bound<'_, PyType>) -> PyResult<Self> {
        struct Known(Vec<(Py<PyType>, Way)>);
        static KNOWN: Mutex<Known> = Mutex::new(Known(Vec::new()));
        let find = |known: &Known| known.0.iter().find(|(known, _)| known.is(class)).map(|&(_, way)| way);
        if let Some(way) = find(&KNOWN.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(way);
        }
        // The lock is not held while Python code runs.
        let way = Self::find_out(class)?;
        KNOWN.lock().unwrap_or_else(PoisonError::into_inner).0.push((class.clone().unbind(), way));
        Ok(way)
    }

    fn find_out(class: &Bound<'_, PyType>) -> PyResult<Self> {
        let py = class.py();
        if numpy::is_numpy(class)? {
            return Ok(Self::Numpy);
        }
        if class.is_subclass_of::<PyCapsule>()? {
            return Ok(Self::Capsule);
        }
        let is_torch = class.hasattr(intern!(py, "requires_grad"))? && class.hasattr(intern!(py, "is_neg"))?;
        let table = class.getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))?;
        Ok(Self::DLPack { describe: table.and_then(|table| capsule::describe(&table)), is_torch })
    }

    /// A view of a tensor, and what keeps its memory alive: to be kept as long as the view.
    fn import(self, object: &Bound<'_, PyAny>, id: &Bound<'_, PyAny>) -> PyResult<(TensorView<'static>, Owner)> {
        match self {
            Self::Numpy => {
                // SAFETY: the capsule is returned together with the view.
                let array = unsafe { numpy::view(object) }?;
                let (view, capsule) = array.map_err(|reason| raise(reason, id))?;
                Ok((view, Owner::Object(capsule)))
            }
            Self::Capsule => consume(object.cast::<PyCapsule>()?, id),
            Self::DLPack { describe, is_torch: true } => {
                let tensor = torch_values(object, id)?;
                if !sparse::is_sparse(&tensor)? {
                    return by_dlpack(&tensor, describe, id);
                }
                let (values, owner) = by_dlpack(&torch_values(&sparse::values(&tensor)?, id)?, describe, id)?;
                Ok((sparse::view(&tensor, values)?.map_err(|reason| raise(reason, id))?, owner))
            }
            Self::DLPack { describe, is_torch: false } => by_dlpack(object, describe, id),
        }
    }
}

fn by_dlpack(
    object: &Bound<'_, PyAny>,
    describe: Option<Describe>,
    id: &Bound<'_, PyAny>,
) -> PyResult<(TensorView<'static>, Owner)> {
    if let Some(describe) = describe {
        let mut tensor = std::mem::MaybeUninit::<DLTensor>::uninit();
        // SAFETY: the table is of the object's own type; it fills the struct or raises.
        let status = unsafe { describe(object.as_ptr().cast(), tensor.as_mut_ptr()) };
        if status != 0 {
            return Err(failed("its DLPack table", PyErr::fetch(object.py()), id));
        }
        // SAFETY: filled, and the object, which stays alive as the owner, keeps the memory. Not guaranteed: that nobody
        // writes to it, or gives the object other memory, meanwhile.
        let view = unsafe { dlpack::view(tensor.assume_init_ref()) };
        return Ok((view.map_err(|reason| raise(reason, id))?, Owner::Object(object.clone().unbind())));
    }
    let py = object.py();
    let Some(export) = object.getattr_opt(intern!(py, "__dlpack__"))? else {
        let accepted = "a NumPy array, or an object that has __dlpack__".into();
        return Err(raise(TensorError::Dtype { accepted, got: errors::type_name(object) }, id));
    };
    let arguments = [(intern!(py, "max_version"), (1, 0))].into_py_dict(py)?;
    let produced = match export.call((), Some(&arguments)) {
        // A producer from before DLPack 1.0, which knows of no versions.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call0(),
        produced => produced,
    };
    let produced = produced.map_err(|cause| failed("its __dlpack__", cause, id))?;
    match produced.cast::<PyCapsule>() {
        Ok(capsule) => consume(capsule, id),
        Err(_) => {
            let reason = format!("its __dlpack__ returned {}, not a capsule", errors::type_name(&produced));
            Err(errors::refuse(py, &errors::name(id), &reason, None))
        }
    }
}

fn consume(capsule: &Bound<'_, PyCapsule>, id: &Bound<'_, PyAny>) -> PyResult<(TensorView<'static>, Owner)> {
    let refuse =
        |cause: PyErr| errors::refuse(id.py(), &errors::name(id), &cause.value(id.py()).to_string(), Some(cause));
    let tensor = capsule::consume(capsule).map_err(refuse)?;
    // SAFETY: the capsule was marked as used, so the tensor is ours alone, and what a producer says of it has to be
    // believed. Not guaranteed: that nobody writes to it meanwhile.
    let view = unsafe { tensor.view() }.map_err(|reason| raise(reason, id))?;
    // SAFETY: another lifetime for the same type; the tensor that it borrows from is returned with it as the owner.
    let view = unsafe { std::mem::transmute::<TensorView<'_>, TensorView<'static>>(view) };
    Ok((view, Owner::Tensor(tensor)))
}

fn raise(reason: TensorError, id: &Bound<'_, PyAny>) -> PyErr {
    errors::raise(id.py(), reason.of(errors::name(id)))
}

fn failed(what: &str, cause: PyErr, id: &Bound<'_, PyAny>) -> PyErr {
    // Torch's exceptions carry a trace of C++ below the message.
    let message = cause.to_string();
    let reason = format!("{what} failed: {}", message.lines().next().unwrap_or_default());
    errors::refuse(id.py(), &errors::name(id), &reason, Some(cause))
}

/// What DLPack does not tell of a torch tensor: a leaf that requires grad is a parameter, not its gradient; a result of
/// `create_graph` has a graph of its own, and is looked at without it; a sign may be still to be applied.
fn torch_values<'py>(tensor: &Bound<'py, PyAny>, id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let mut tensor = tensor.clone();
    if tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
        if tensor.getattr(intern!(py, "is_leaf"))?.is_truthy()? {
            let reason = "expected a gradient, got a leaf tensor that requires grad: pass its .grad";
            return Err(errors::refuse(py, &errors::name(id), reason, None));
        }
        tensor = tensor.call_method0(intern!(py, "detach"))?;
    }
    if tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        tensor = tensor.call_method0(intern!(py, "resolve_neg"))?;
    }
    if tensor.call_method0(intern!(py, "is_conj"))?.is_truthy()? {
        tensor = tensor.call_method0(intern!(py, "resolve_conj"))?;
    }
    Ok(tensor)
}
