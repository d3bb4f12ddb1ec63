//! Gradients as Python gives them: NumPy arrays, DLPack capsules, and whatever makes such.

use std::ffi::{c_char, c_int, c_void};

use gradacc::dlpack::Imported;
use gradacc::{DType, Error, TensorError, TensorView};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyCapsule, PyTuple, PyType};
use pyo3::{ffi, intern};

use crate::{capsule, errors};

/// Somebody's tensor, kept alive and unchanged in shape while we look at it.
pub(crate) enum Source {
    DLPack(Imported),
    Array(Array),
}

impl Source {
    /// Copies nothing. `id` is for messages.
    pub(crate) fn new(object: &Bound<'_, PyAny>, id: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        if is_numpy(object)? {
            return Array::new(object, id).map(Self::Array);
        }
        if let Ok(capsule) = object.cast::<PyCapsule>() {
            return consume(capsule, id);
        }
        let object = match object.getattr_opt(intern!(py, "requires_grad"))? {
            Some(requires_grad) => torch_values(object, requires_grad.is_truthy()?, id)?,
            None => object.clone(),
        };
        let Some(export) = object.getattr_opt(intern!(py, "__dlpack__"))? else {
            let accepted = "a NumPy array, or an object that has __dlpack__".into();
            let got = errors::type_name(&object);
            return Err(raise(py, TensorError::Dtype { accepted, got }, id));
        };
        let arguments = [(intern!(py, "max_version"), (1, 0))].into_py_dict(py)?;
        let produced = match export.call((), Some(&arguments)) {
            // A producer from before DLPack 1.0, which knows of no versions.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call0(),
            produced => produced,
        };
        let produced = produced.map_err(|cause| {
            let reason = format!("its __dlpack__ failed: {cause}");
            errors::refuse(py, &errors::name(id), &reason, Some(cause))
        })?;
        match produced.cast::<PyCapsule>() {
            Ok(capsule) => consume(capsule, id),
            Err(_) => {
                let reason = format!("its __dlpack__ returned {}, not a capsule", errors::type_name(&produced));
                Err(errors::refuse(py, &errors::name(id), &reason, None))
            }
        }
    }

    pub(crate) fn view(&self) -> Result<TensorView<'_>, TensorError> {
        match self {
            // SAFETY: the capsule it came from was marked as used, so it is ours alone, and what a producer says of its
            // tensor has to be believed. Not guaranteed: that nobody writes to it meanwhile.
            Self::DLPack(tensor) => unsafe { tensor.view() },
            Self::Array(array) => array.view(),
        }
    }
}

fn consume(capsule: &Bound<'_, PyCapsule>, id: &Bound<'_, PyAny>) -> PyResult<Source> {
    let refuse =
        |cause: PyErr| errors::refuse(id.py(), &errors::name(id), &cause.value(id.py()).to_string(), Some(cause));
    capsule::consume(capsule).map(Source::DLPack).map_err(refuse)
}

fn raise(py: Python<'_>, reason: TensorError, id: &Bound<'_, PyAny>) -> PyErr {
    errors::raise(py, reason.of(errors::name(id)))
}

/// What DLPack does not tell of a torch tensor: a leaf that requires grad is a parameter, not its gradient; a result of
/// `create_graph` has a graph of its own, and is looked at without it; a sign may be still to be applied.
fn torch_values<'py>(
    tensor: &Bound<'py, PyAny>,
    requires_grad: bool,
    id: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    let mut tensor = tensor.clone();
    if requires_grad {
        if tensor.getattr(intern!(py, "is_leaf"))?.is_truthy()? {
            let reason = "expected a gradient, got a leaf tensor that requires grad: pass its .grad";
            return Err(errors::refuse(py, &errors::name(id), reason, None));
        }
        tensor = tensor.call_method0(intern!(py, "detach"))?;
    }
    if tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        tensor = tensor.call_method0(intern!(py, "resolve_neg"))?;
    }
    Ok(tensor)
}

/// Whether an object is a NumPy array or scalar.
fn is_numpy(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static SCALAR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = object.py();
    Ok(object.is_instance(ARRAY.import(py, "numpy", "ndarray")?)?
        || object.is_instance(SCALAR.import(py, "numpy", "generic")?)?)
}

/// A NumPy array, by the capsule of its `__array_struct__`, which keeps it alive.
///
/// Unlike `__dlpack__` that works for read-only arrays and for scalars, in every NumPy, and is quick.
pub(crate) struct Array {
    capsule: Py<PyAny>,
    dtype: DType,
}

/// `PyArrayInterface` of <https://numpy.org/doc/stable/reference/arrays.interface.html>.
#[repr(C)]
struct ArrayInterface {
    two: c_int,
    ndim: c_int,
    kind: c_char,
    element_bytes: c_int,
    flags: c_int,
    shape: *const ffi::Py_ssize_t,
    /// In bytes.
    strides: *const ffi::Py_ssize_t,
    data: *const c_void,
}

/// `NPY_ARRAY_NOTSWAPPED`.
const NATIVE_BYTE_ORDER: c_int = 0x200;

impl Array {
    fn new(array: &Bound<'_, PyAny>, id: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = array.py();
        let capsule = array.getattr(intern!(py, "__array_struct__"))?;
        // SAFETY: `__array_struct__` of a NumPy object is such a capsule.
        let interface = unsafe { &*Self::interface(&capsule)? };
        let name =
            || -> PyResult<String> { array.getattr(intern!(py, "dtype"))?.getattr(intern!(py, "name"))?.extract() };
        let dtype = match (interface.kind as u8, interface.element_bytes) {
            (b'f', 2) => DType::F16,
            (b'f', 4) => DType::F32,
            (b'f', 8) => DType::F64,
            // As ml_dtypes defines it.
            (b'V', 2) if name()? == DType::BF16.name() => DType::BF16,
            _ => return Err(raise(py, TensorError::unsupported(name()?), id)),
        };
        if interface.flags & NATIVE_BYTE_ORDER == 0 {
            return Err(raise(py, TensorError::unsupported(format!("{dtype} in foreign byte order")), id));
        }
        Ok(Self { capsule: capsule.unbind(), dtype })
    }

    fn interface(capsule: &Bound<'_, PyAny>) -> PyResult<*const ArrayInterface> {
        // SAFETY: any object may be asked; for one that is no such capsule it raises.
        let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), std::ptr::null()) };
        if pointer.is_null() { Err(PyErr::fetch(capsule.py())) } else { Ok(pointer.cast_const().cast()) }
    }

    fn view(&self) -> Result<TensorView<'_>, TensorError> {
        Python::attach(|py| {
            let interface =
                Self::interface(self.capsule.bind(py)).map_err(|error| TensorError::Malformed(error.to_string()))?;
            // SAFETY: checked to be such a capsule when this was made.
            let interface = unsafe { &*interface };
            let ndim = interface.ndim as usize;
            let entries = |start: *const ffi::Py_ssize_t| -> &[isize] {
                // SAFETY: NumPy gives `ndim` entries, of an array whose shape nobody changes while it is lent out.
                if ndim == 0 { &[] } else { unsafe { std::slice::from_raw_parts(start, ndim) } }
            };
            let shape: Vec<usize> = entries(interface.shape).iter().map(|&size| size as usize).collect();
            let element_bytes = self.dtype.len_bytes() as isize;
            let strides = entries(interface.strides);
            // A dimension of size 1 may have any stride.
            if strides.iter().zip(&shape).any(|(stride, &size)| size > 1 && stride % element_bytes != 0) {
                return Err(TensorError::Malformed(
                    "expected strides that are multiples of the element size: pass numpy.ascontiguousarray of it"
                        .into(),
                ));
            }
            let strides: Vec<isize> = strides.iter().map(|stride| stride / element_bytes).collect();
            // SAFETY: NumPy arrays lie in one allocation, which the capsule keeps alive. Not guaranteed: that nobody
            // writes to it meanwhile.
            unsafe { TensorView::from_raw_parts(interface.data, self.dtype, &shape, Some(&strides)) }
        })
    }
}

/// A parameter's shape and dtype, by the dtype's name.
pub(crate) fn spec(id: u64, name: String, shape: Vec<usize>, dtype: &str) -> Result<gradacc::ParamSpec, Error> {
    let dtype: DType = dtype.parse().map_err(|reason: TensorError| reason.of(&name))?;
    Ok(gradacc::ParamSpec { id: gradacc::ParamId(id), name, shape: shape.into(), dtype })
}

/// A version as `__dlpack__` is given it.
pub(crate) fn is_versioned(max_version: Option<Bound<'_, PyTuple>>) -> PyResult<bool> {
    max_version.map_or(Ok(false), |version| Ok(version.get_item(0)?.extract::<i64>()? >= 1))
}
