//! Gradients as Python gives them: NumPy arrays, DLPack capsules, and whatever makes such.

use std::sync::{Mutex, PoisonError};

use gradacc::dlpack::abi::{DEVICE_CPU, DEVICE_CUDA_HOST, DLTensor};
use gradacc::dlpack::{self, Imported};
use gradacc::{DType, Shape, TensorError, TensorView};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyCapsule, PyType};
use pyo3::{ffi, intern};

use crate::capsule::{self, Describe};
use crate::store::{Tensor, TorchTensor};
use crate::{errors, numpy, sparse};

/// Which store gradients are for.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Backend {
    /// The engine's if they are in host memory, and torch's elsewhere.
    Auto,
    /// The engine's; what is elsewhere is refused.
    Engine,
    /// Torch's, all of them.
    Torch,
    /// The engine's; what is elsewhere is copied to host memory first.
    Host,
}

/// The gradients of a micro-batch by their parameters' numbers, and what keeps their memory alive. Copies nothing.
///
/// In two steps, so that no Python code runs once the first address is known: it could free what was looked at.
pub(crate) struct Batch<'py> {
    backend: Backend,
    sources: Vec<(usize, Source<'py>)>,
    last: Option<(*mut ffi::PyTypeObject, Way)>,
}

/// A gradient that all Python code has been run for.
enum Source<'py> {
    /// With memory that stays where it is for as long as the owner is there.
    Owned(TensorView<'static>, Owner),
    /// To be described by DLPack's C table.
    Table { tensor: Bound<'py, PyAny>, describe: Describe, id: Bound<'py, PyAny> },
    /// The same, of the values of a sparse tensor.
    Rows { tensor: Bound<'py, PyAny>, values: Box<Source<'py>>, id: Bound<'py, PyAny> },
    /// For torch.
    Torch(TorchTensor),
}

/// What keeps memory alive.
#[expect(dead_code, reason = "held, not read")]
pub(crate) enum Owner {
    Object(Py<PyAny>),
    Tensor(Imported),
}

/// Gradients that have been looked at, and what keeps their memory alive.
pub(crate) struct Tensors {
    /// Their lifetime is in truth that of the owners: they are lent out, and nobody clones them.
    tensors: Vec<(usize, Tensor<'static>)>,
    owners: Vec<Owner>,
}

impl Tensors {
    /// The gradients, for as long as this is there.
    pub(crate) fn tensors(&mut self) -> &mut [(usize, Tensor<'static>)] {
        &mut self.tensors
    }
}

impl<'py> Batch<'py> {
    pub(crate) fn with_capacity(capacity: usize, backend: Backend) -> Self {
        Self { backend, sources: Vec::with_capacity(capacity), last: None }
    }

    /// Takes one more gradient. `id` is for messages.
    pub(crate) fn push(&mut self, number: usize, object: &Bound<'py, PyAny>, id: &Bound<'py, PyAny>) -> PyResult<()> {
        let class = object.get_type_ptr();
        let way = match self.last {
            Some((last, way)) if last == class => way,
            _ => Way::of(&object.get_type())?,
        };
        self.last = Some((class, way));
        self.sources.push((number, way.source(object, id, self.backend)?));
        Ok(())
    }

    /// Looks at all of them.
    pub(crate) fn look(self) -> PyResult<Tensors> {
        let capacity = self.sources.len();
        let mut looked_at = Tensors { tensors: Vec::with_capacity(capacity), owners: Vec::with_capacity(capacity) };
        for (number, source) in self.sources {
            let tensor = match source {
                Source::Torch(tensor) => Tensor::Torch(Box::new(tensor)),
                source => {
                    let (view, owner) = source.look()?;
                    looked_at.owners.push(owner);
                    Tensor::Host(view)
                }
            };
            looked_at.tensors.push((number, tensor));
        }
        Ok(looked_at)
    }
}

impl Source<'_> {
    fn look(self) -> PyResult<(TensorView<'static>, Owner)> {
        match self {
            Self::Owned(view, owner) => Ok((view, owner)),
            Self::Table { tensor, describe, id } => described(&tensor, describe, &id),
            Self::Rows { tensor, values, id } => {
                let (values, owner) = values.look()?;
                Ok((sparse::view(&tensor, values)?.map_err(|reason| raise(reason, &id))?, owner))
            }
            Self::Torch(_) => unreachable!("its elements are torch's to look at"),
        }
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
    /// A DTensor of torch, of which this process has a shard.
    Shard,
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
        if class.hasattr(intern!(py, "to_local"))? && class.hasattr(intern!(py, "device_mesh"))? {
            return Ok(Self::Shard);
        }
        let is_torch = class.hasattr(intern!(py, "requires_grad"))? && class.hasattr(intern!(py, "is_neg"))?;
        let table = class.getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))?;
        Ok(Self::DLPack { describe: table.and_then(|table| capsule::describe(&table)), is_torch })
    }

    /// Runs all Python code that a gradient needs.
    fn source<'py>(
        self,
        object: &Bound<'py, PyAny>,
        id: &Bound<'py, PyAny>,
        backend: Backend,
    ) -> PyResult<Source<'py>> {
        let py = object.py();
        let source = match self {
            Self::Numpy => {
                // SAFETY: the capsule is returned together with the view.
                let array = unsafe { numpy::view(object) }?;
                let (view, capsule) = array.map_err(|reason| raise(reason, id))?;
                Source::Owned(view, Owner::Object(capsule))
            }
            Self::Capsule => consume(object.cast::<PyCapsule>()?, id)?,
            Self::Shard => {
                let shards = py.import(intern!(py, "gradacc.torch.shards"))?;
                let shard = shards.call_method1(intern!(py, "local"), (object,));
                let shard = shard.map_err(|cause| failed("its to_local()", cause, id))?;
                return Self::of(&shard.get_type())?.source(&shard, id, backend);
            }
            Self::DLPack { describe, is_torch: true } => {
                let tensor = torch_values(object, id)?;
                let is_host = tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?;
                if backend == Backend::Torch || (backend == Backend::Auto && !is_host) {
                    return torch_tensor(tensor, id).map(Source::Torch);
                }
                let tensor = match backend {
                    Backend::Host if !is_host => devices(py)?.call_method1(intern!(py, "to_host"), (tensor,))?,
                    _ => tensor,
                };
                if !sparse::is_sparse(&tensor)? {
                    return by_dlpack(&tensor, describe, id);
                }
                let values = by_dlpack(&torch_values(&sparse::values(&tensor)?, id)?, describe, id)?;
                return Ok(Source::Rows { tensor, values: Box::new(values), id: id.clone() });
            }
            Self::DLPack { describe, is_torch: false } => {
                if backend != Backend::Engine && is_elsewhere(object)? {
                    // Another library's tensor on a device: torch's from here on.
                    let tensor = devices(py)?.call_method1(intern!(py, "from_foreign"), (object,));
                    let tensor = tensor.map_err(|cause| failed("torch.from_dlpack", cause, id))?;
                    return Self::of(&tensor.get_type())?.source(&tensor, id, backend);
                }
                by_dlpack(object, describe, id)?
            }
        };
        if backend != Backend::Torch {
            return Ok(source);
        }
        // Not torch's own, and for torch: a copy is.
        let (view, _owner) = source.look()?;
        let of = (PyBytes::new(py, &view.to_bytes()), view.shape().to_vec(), view.dtype().name());
        torch_tensor(devices(py)?.call_method1(intern!(py, "from_bytes"), of)?, id).map(Source::Torch)
    }
}

/// The module that knows torch's devices.
fn devices(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import(intern!(py, "gradacc.torch.store"))
}

/// A tensor as torch has it. `id` is for messages.
fn torch_tensor(tensor: Bound<'_, PyAny>, id: &Bound<'_, PyAny>) -> PyResult<TorchTensor> {
    let py = tensor.py();
    let layout = tensor.getattr(intern!(py, "layout"))?.str()?.to_string_lossy().into_owned();
    if layout != "torch.strided" && layout != "torch.sparse_coo" {
        let reason = format!("expected a gradient of layout torch.strided or torch.sparse_coo, got {layout}");
        return Err(errors::refuse(py, &errors::name(id), &reason, None));
    }
    let dtype = tensor.getattr(intern!(py, "dtype"))?.str()?.to_string_lossy().into_owned();
    let dtype = dtype.strip_prefix("torch.").unwrap_or(&dtype);
    let dtype = dtype.parse::<DType>().map_err(|reason| raise(reason, id))?;
    let shape = tensor.getattr(intern!(py, "shape"))?.try_iter()?.map(|n| n?.extract()).collect::<PyResult<Shape>>()?;
    let device = tensor.getattr(intern!(py, "device"))?.str()?.to_string_lossy().into_owned();
    Ok(TorchTensor { object: tensor.unbind(), shape, dtype, device })
}

/// Whether a tensor says that it is not in host memory.
fn is_elsewhere(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    let Some(device) = object.getattr_opt(intern!(py, "__dlpack_device__"))? else { return Ok(false) };
    let device = device.call0()?.get_item(0)?.call_method0(intern!(py, "__int__"))?.extract::<i32>()?;
    Ok(device != DEVICE_CPU && device != DEVICE_CUDA_HOST)
}

fn described(
    object: &Bound<'_, PyAny>,
    describe: Describe,
    id: &Bound<'_, PyAny>,
) -> PyResult<(TensorView<'static>, Owner)> {
    let mut tensor = std::mem::MaybeUninit::<DLTensor>::uninit();
    // SAFETY: the table is of the object's own type; it fills the struct or raises.
    let status = unsafe { describe(object.as_ptr().cast(), tensor.as_mut_ptr()) };
    if status != 0 {
        return Err(failed("its DLPack table", PyErr::fetch(object.py()), id));
    }
    // SAFETY: filled, and the object, which stays alive as the owner, keeps the memory. Not guaranteed: that nobody
    // writes to it, or gives the object other memory, meanwhile.
    let view = unsafe { dlpack::view(tensor.assume_init_ref()) };
    Ok((view.map_err(|reason| raise(reason, id))?, Owner::Object(object.clone().unbind())))
}

fn by_dlpack<'py>(
    object: &Bound<'py, PyAny>,
    describe: Option<Describe>,
    id: &Bound<'py, PyAny>,
) -> PyResult<Source<'py>> {
    if let Some(describe) = describe {
        return Ok(Source::Table { tensor: object.clone(), describe, id: id.clone() });
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

fn consume<'py>(capsule: &Bound<'_, PyCapsule>, id: &Bound<'_, PyAny>) -> PyResult<Source<'py>> {
    let refuse =
        |cause: PyErr| errors::refuse(id.py(), &errors::name(id), &cause.value(id.py()).to_string(), Some(cause));
    let tensor = capsule::consume(capsule).map_err(refuse)?;
    // SAFETY: the capsule was marked as used, so the tensor is ours alone, and what a producer says of it has to be
    // believed. Not guaranteed: that nobody writes to it meanwhile.
    let view = unsafe { tensor.view() }.map_err(|reason| raise(reason, id))?;
    // SAFETY: another lifetime for the same type; the tensor that it borrows from is returned with it as the owner.
    let view = unsafe { std::mem::transmute::<TensorView<'_>, TensorView<'static>>(view) };
    Ok(Source::Owned(view, Owner::Tensor(tensor)))
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
