//! Gradients for others.

use std::ptr::{self, NonNull};

use super::VERSION;
use super::abi::{
    CODE_BFLOAT, CODE_COMPLEX, CODE_FLOAT, DEVICE_CPU, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned,
    DLTensor,
};
use crate::dtype::DType;
use crate::gradients::Gradient;

/// A managed tensor, which comes first so that a pointer to it is one to the whole, and what its pointers point to.
#[repr(C)]
struct Export<M> {
    managed: M,
    /// Sizes, then strides.
    _dimensions: Vec<i64>,
    /// Keeps the memory alive.
    _gradient: Gradient,
}

/// Hands a gradient over as DLPack 1.x does. Aliases its memory, writable; the deleter, which may be called on any
/// thread, lets go of it.
pub fn export_versioned(gradient: Gradient) -> NonNull<DLManagedTensorVersioned> {
    export(gradient, |dl_tensor| DLManagedTensorVersioned {
        version: VERSION,
        manager_ctx: ptr::null_mut(),
        deleter: Some(delete),
        flags: 0,
        dl_tensor,
    })
}

/// Hands a gradient over as DLPack did before 1.0, for consumers that know nothing newer. Otherwise the same.
pub fn export_legacy(gradient: Gradient) -> NonNull<DLManagedTensor> {
    export(gradient, |dl_tensor| DLManagedTensor { dl_tensor, manager_ctx: ptr::null_mut(), deleter: Some(delete) })
}

fn export<M>(gradient: Gradient, manage: impl FnOnce(DLTensor) -> M) -> NonNull<M> {
    let shape = gradient.shape();
    let mut dimensions: Vec<i64> = shape.iter().map(|&size| size as i64).chain(row_major(shape)).collect();
    let start = dimensions.as_mut_ptr();
    let managed = manage(DLTensor {
        data: gradient.as_ptr().cast_mut().cast(),
        device: DLDevice { device_type: DEVICE_CPU, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: dtype(gradient.dtype()),
        shape: start,
        strides: start.wrapping_add(shape.len()),
        byte_offset: 0,
    });
    let export = Box::new(Export { managed, _dimensions: dimensions, _gradient: gradient });
    NonNull::from(Box::leak(export)).cast()
}

/// # Safety
/// `managed` comes from `export` and is not used again.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: this function's contract: the managed tensor comes first in a leaked Box. Not guaranteed: that the consumer
    // calls it once only.
    drop(unsafe { Box::from_raw(managed.cast::<Export<M>>()) });
}

/// Strides of a row-major tensor.
fn row_major(shape: &[usize]) -> impl Iterator<Item = i64> {
    (1..=shape.len()).map(|axis| shape[axis..].iter().map(|&size| size as i64).product())
}

fn dtype(dtype: DType) -> DLDataType {
    let (code, bits) = match dtype {
        DType::F16 => (CODE_FLOAT, 16),
        DType::BF16 => (CODE_BFLOAT, 16),
        DType::F32 => (CODE_FLOAT, 32),
        DType::F64 => (CODE_FLOAT, 64),
        DType::Complex64 => (CODE_COMPLEX, 64),
        DType::Complex128 => (CODE_COMPLEX, 128),
    };
    DLDataType { code, bits, lanes: 1 }
}
