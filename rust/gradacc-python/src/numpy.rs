//! NumPy arrays, by `__array_struct__`.
//!
//! Unlike `__dlpack__` it works for read-only arrays and for scalars, in every NumPy, and is as quick.

use std::ffi::{c_char, c_int, c_void};

use gradacc::{DType, Shape, TensorError, TensorView};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use pyo3::{ffi, intern};

/// Whether a type is that of NumPy arrays or scalars.
pub(crate) fn is_numpy(class: &Bound<'_, PyType>) -> PyResult<bool> {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static SCALAR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = class.py();
    Ok(class.is_subclass(ARRAY.import(py, "numpy", "ndarray")?)?
        || class.is_subclass(SCALAR.import(py, "numpy", "generic")?)?)
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

/// A view of an array, and the capsule that keeps its memory alive. Copies nothing.
///
/// # Safety
/// The view is not used after the capsule is gone.
pub(crate) unsafe fn view(array: &Bound<'_, PyAny>) -> PyResult<Result<(TensorView<'static>, Py<PyAny>), TensorError>> {
    let py = array.py();
    let capsule = array.getattr(intern!(py, "__array_struct__"))?;
    // SAFETY: any object may be asked; for one that is no such capsule it raises.
    let interface = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), std::ptr::null()) };
    if interface.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: `__array_struct__` of a NumPy object is a capsule of this struct, which lives as long as the capsule.
    let interface = unsafe { &*interface.cast_const().cast::<ArrayInterface>() };
    let dtype = match dtype(array, interface)? {
        Ok(dtype) => dtype,
        Err(reason) => return Ok(Err(reason)),
    };
    let ndim = interface.ndim as usize;
    let entries = |start: *const ffi::Py_ssize_t| -> &[isize] {
        // SAFETY: NumPy gives `ndim` entries, of an array whose shape nobody changes while the capsule is there.
        if ndim == 0 { &[] } else { unsafe { std::slice::from_raw_parts(start, ndim) } }
    };
    let shape: Shape = entries(interface.shape).iter().map(|&size| size as usize).collect();
    let element_bytes = dtype.len_bytes() as isize;
    let strides = entries(interface.strides);
    // A dimension of size 1 may have any stride.
    if strides.iter().zip(&shape).any(|(stride, &size)| size > 1 && stride % element_bytes != 0) {
        let reason = "expected strides that are multiples of the element size: pass numpy.ascontiguousarray of it";
        return Ok(Err(TensorError::Malformed(reason.into())));
    }
    let strides: Vec<isize> = strides.iter().map(|stride| stride / element_bytes).collect();
    // SAFETY: NumPy arrays lie in one allocation, which the capsule keeps alive, by this function's contract for as long
    // as the view. Not guaranteed: that nobody writes to it meanwhile.
    let view = unsafe { TensorView::from_raw_parts(interface.data, dtype, &shape, Some(&strides)) };
    Ok(view.map(|view| (view, capsule.unbind())))
}

fn dtype(array: &Bound<'_, PyAny>, interface: &ArrayInterface) -> PyResult<Result<DType, TensorError>> {
    let py = array.py();
    let name = || -> PyResult<String> { array.getattr(intern!(py, "dtype"))?.getattr(intern!(py, "name"))?.extract() };
    let dtype = match (interface.kind as u8, interface.element_bytes) {
        (b'f', 2) => DType::F16,
        (b'f', 4) => DType::F32,
        (b'f', 8) => DType::F64,
        (b'c', 8) => DType::Complex64,
        (b'c', 16) => DType::Complex128,
        // As ml_dtypes defines it.
        (b'V', 2) if name()? == DType::BF16.name() => DType::BF16,
        _ => return Ok(Err(TensorError::unsupported(name()?))),
    };
    if interface.flags & NATIVE_BYTE_ORDER == 0 {
        return Ok(Err(TensorError::unsupported(format!("{dtype} in foreign byte order"))));
    }
    Ok(Ok(dtype))
}
