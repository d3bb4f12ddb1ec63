//! DLPack's capsules.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use gradacc::Gradient;
use gradacc::dlpack::abi::{DLManagedTensor, DLManagedTensorVersioned, DLPackExchangeAPI, DLTensor};
use gradacc::dlpack::{Imported, VERSION, export_legacy, export_versioned};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

const VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";
const LEGACY: &CStr = c"dltensor";
const USED_LEGACY: &CStr = c"used_dltensor";
const EXCHANGE: &CStr = c"dlpack_exchange_api";

/// Takes the tensor out of a capsule, which is marked as used.
pub(crate) fn consume(capsule: &Bound<'_, PyCapsule>) -> PyResult<Imported> {
    if let Some(tensor) = take(capsule, VERSIONED, USED_VERSIONED)? {
        // SAFETY: from a producer's capsule, which has just been marked as used.
        Ok(unsafe { Imported::from_versioned(tensor.cast()) })
    } else if let Some(tensor) = take(capsule, LEGACY, USED_LEGACY)? {
        // SAFETY: as above.
        Ok(unsafe { Imported::from_legacy(tensor.cast()) })
    } else {
        Err(PyBufferError::new_err("the capsule holds no DLPack tensor, or one that was consumed before"))
    }
}

fn take(capsule: &Bound<'_, PyCapsule>, name: &CStr, used: &'static CStr) -> PyResult<Option<NonNull<c_void>>> {
    // SAFETY: `capsule` is a capsule, and the names are NUL-terminated. The one that is set is static, as it must be.
    unsafe {
        let capsule = capsule.as_ptr();
        if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) == 0 {
            return Ok(None);
        }
        let tensor = NonNull::new(ffi::PyCapsule_GetPointer(capsule, name.as_ptr()));
        if tensor.is_none() || ffi::PyCapsule_SetName(capsule, used.as_ptr()) != 0 {
            return Err(PyErr::fetch(Python::assume_attached()));
        }
        Ok(tensor)
    }
}

/// Describes a tensor of the type it was found at; see [`DLPackExchangeAPI`].
pub(crate) type Describe = unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> i32;

/// What describes tensors, of the C table that a type has in a capsule; None if the table is of another major version.
pub(crate) fn describe(capsule: &Bound<'_, PyAny>) -> Option<Describe> {
    // SAFETY: a capsule of that name holds such a table, which stays for the life of the process.
    let table = unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), EXCHANGE.as_ptr()) == 0 {
            return None;
        }
        &*ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE.as_ptr()).cast_const().cast::<DLPackExchangeAPI>()
    };
    table.dltensor_from_py_object_no_sync.filter(|_| table.header.version.major == VERSION.major)
}

/// A capsule that hands a gradient over, to be consumed once at most. Aliases its memory.
pub(crate) fn export<'py>(py: Python<'py>, gradient: Gradient, versioned: bool) -> PyResult<Bound<'py, PyAny>> {
    if versioned {
        let tensor = export_versioned(gradient);
        // SAFETY: `destroy_versioned` is for capsules of this name with such a tensor.
        unsafe { new(py, tensor.cast(), VERSIONED, destroy_versioned) }
            // SAFETY: no capsule was made, so the tensor is still ours alone.
            .inspect_err(|_| drop(unsafe { Imported::from_versioned(tensor) }))
    } else {
        let tensor = export_legacy(gradient);
        // SAFETY: as above.
        unsafe { new(py, tensor.cast(), LEGACY, destroy_legacy) }
            .inspect_err(|_| drop(unsafe { Imported::from_legacy(tensor) }))
    }
}

/// # Safety
/// `destroy` frees the tensor of such a capsule.
unsafe fn new<'py>(
    py: Python<'py>,
    tensor: NonNull<c_void>,
    name: &'static CStr,
    destroy: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the pointer is not null, the name is static, and a new reference is returned, or NULL with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(tensor.as_ptr(), name.as_ptr(), Some(destroy))) }
}

/// # Safety
/// Called by the interpreter with a capsule of `export`.
unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule that still has its name was never consumed: the tensor is ours to free.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) != 0 {
            let tensor = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast::<DLManagedTensorVersioned>();
            NonNull::new(tensor).map(|tensor| Imported::from_versioned(tensor));
        }
    }
}

/// # Safety
/// Called by the interpreter with a capsule of `export`.
unsafe extern "C" fn destroy_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) != 0 {
            let tensor = ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr()).cast::<DLManagedTensor>();
            NonNull::new(tensor).map(|tensor| Imported::from_legacy(tensor));
        }
    }
}
