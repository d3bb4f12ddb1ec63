//! Tensors of others.

use std::ptr::NonNull;

use smallvec::SmallVec;

use super::VERSION;
use super::abi::{
    CODE_BFLOAT, CODE_COMPLEX, CODE_FLOAT, DEVICE_CPU, DEVICE_CUDA_HOST, DLDataType, DLManagedTensor,
    DLManagedTensorVersioned, DLTensor,
};
use crate::dtype::DType;
use crate::error::TensorError;
use crate::param::Shape;
use crate::view::TensorView;

/// A tensor that a producer has handed to us. Its deleter is called when this is dropped.
#[derive(Debug)]
pub struct Imported(Managed);

#[derive(Debug)]
enum Managed {
    Versioned(NonNull<DLManagedTensorVersioned>),
    Legacy(NonNull<DLManagedTensor>),
}

impl Imported {
    /// Takes over a tensor of DLPack 1.x.
    ///
    /// # Safety
    /// The pointer is a producer's, and nobody else consumes it.
    pub unsafe fn from_versioned(tensor: NonNull<DLManagedTensorVersioned>) -> Self {
        Self(Managed::Versioned(tensor))
    }

    /// Takes over a tensor of a version before 1.0.
    ///
    /// # Safety
    /// As for [`from_versioned`](Self::from_versioned).
    pub unsafe fn from_legacy(tensor: NonNull<DLManagedTensor>) -> Self {
        Self(Managed::Legacy(tensor))
    }

    /// Looks at the tensor; copies nothing.
    ///
    /// # Errors
    /// If it is not in host memory, of a dtype that no buffer takes, or of another major version of DLPack.
    ///
    /// # Safety
    /// The tensor is what its producer says.
    pub unsafe fn view(&self) -> Result<TensorView<'_>, TensorError> {
        match &self.0 {
            // SAFETY: consumed by this value alone, which keeps the memory; the rest is this function's contract.
            Managed::Legacy(managed) => unsafe { view(&managed.as_ref().dl_tensor) },
            Managed::Versioned(managed) => {
                // SAFETY: as above; the version comes first in every version.
                let version = unsafe { (*managed.as_ptr()).version };
                if version.major != VERSION.major {
                    let reason =
                        format!("expected DLPack {}.x, got {}.{}", VERSION.major, version.major, version.minor);
                    return Err(TensorError::Malformed(reason));
                }
                // SAFETY: this function's contract, and the layout is the one we know.
                unsafe { view(&managed.as_ref().dl_tensor) }
            }
        }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        match self.0 {
            Managed::Versioned(managed) => {
                // SAFETY: the producer's pointer, consumed by this value alone; the deleter's place is the same in every
                // version. Not guaranteed: that the deleter is sound, which is the producer's part.
                unsafe {
                    if let Some(delete) = (*managed.as_ptr()).deleter {
                        delete(managed.as_ptr());
                    }
                }
            }
            Managed::Legacy(managed) => {
                // SAFETY: as above.
                unsafe {
                    if let Some(delete) = (*managed.as_ptr()).deleter {
                        delete(managed.as_ptr());
                    }
                }
            }
        }
    }
}

/// Looks at a tensor; copies nothing.
///
/// # Errors
/// If it is not in host memory, or of a dtype that no buffer takes.
///
/// # Safety
/// `tensor` is what it says: `shape` and `strides`, where not NULL, have `ndim` entries, and every element they reach
/// lies in one allocation, readable for `'a`.
pub unsafe fn view<'a>(tensor: &DLTensor) -> Result<TensorView<'a>, TensorError> {
    if !matches!(tensor.device.device_type, DEVICE_CPU | DEVICE_CUDA_HOST) {
        return Err(TensorError::Device { device_type: tensor.device.device_type });
    }
    let dtype = dtype(tensor.dtype)?;
    let malformed = |what: &str| TensorError::Malformed(format!("expected a DLPack tensor, got one with {what}"));
    let ndim = usize::try_from(tensor.ndim).map_err(|_| malformed("a negative number of dimensions"))?;
    let entries = |start: *const i64| -> &[i64] {
        // SAFETY: this function's contract.
        if start.is_null() || ndim == 0 { &[] } else { unsafe { std::slice::from_raw_parts(start, ndim) } }
    };
    let sizes = entries(tensor.shape);
    if sizes.len() != ndim {
        return Err(malformed("no shape"));
    }
    let shape: Result<Shape, _> = sizes.iter().map(|&size| usize::try_from(size)).collect();
    let shape = shape.map_err(|_| malformed("a negative size"))?;
    if tensor.data.is_null() && !shape.contains(&0) {
        return Err(malformed("elements and no memory"));
    }
    let strides: SmallVec<[isize; 4]> = entries(tensor.strides).iter().map(|&stride| stride as isize).collect();
    let strides = (!tensor.strides.is_null()).then_some(&strides[..]);
    let data = tensor.data.cast_const().cast::<u8>().wrapping_add(tensor.byte_offset as usize);
    // SAFETY: this function's contract.
    unsafe { TensorView::from_raw_parts(data.cast(), dtype, &shape, strides) }
}

fn dtype(dtype: DLDataType) -> Result<DType, TensorError> {
    match (dtype.code, dtype.bits, dtype.lanes) {
        (CODE_FLOAT, 16, 1) => Ok(DType::F16),
        (CODE_FLOAT, 32, 1) => Ok(DType::F32),
        (CODE_FLOAT, 64, 1) => Ok(DType::F64),
        (CODE_BFLOAT, 16, 1) => Ok(DType::BF16),
        (CODE_COMPLEX, 64, 1) => Ok(DType::Complex64),
        (CODE_COMPLEX, 128, 1) => Ok(DType::Complex128),
        _ => Err(TensorError::unsupported(name(dtype))),
    }
}

/// The name of a dtype that we do not take.
fn name(dtype: DLDataType) -> String {
    let kind = match dtype.code {
        0 => "int",
        1 => "uint",
        CODE_FLOAT => "float",
        CODE_BFLOAT => "bfloat",
        CODE_COMPLEX => "complex",
        6 => "bool",
        _ => return format!("DLPack dtype (code {}, {} bits, {} lanes)", dtype.code, dtype.bits, dtype.lanes),
    };
    match (dtype.code, dtype.lanes) {
        (6, 1) => kind.into(),
        (_, 1) => format!("{kind}{}", dtype.bits),
        (_, lanes) => format!("{kind}{}x{lanes} (a vector type)", dtype.bits),
    }
}
