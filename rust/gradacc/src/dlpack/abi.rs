//! The C structs of DLPack 1.x, as <https://dmlc.github.io/dlpack/latest/c_api.html> lays them down.

use std::ffi::c_void;

/// `DLPackVersion`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DLPackVersion {
    /// Structs of different major versions have different layouts.
    pub major: u32,
    /// Minor versions add values and leave the layout.
    pub minor: u32,
}

/// `DLDevice`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DLDevice {
    /// One of `DLDeviceType`, such as [`DEVICE_CPU`].
    pub device_type: i32,
    /// Which of them; 0 for the host.
    pub device_id: i32,
}

/// `kDLCPU`: host memory.
pub const DEVICE_CPU: i32 = 1;
/// `kDLCUDAHost`: host memory, pinned.
pub const DEVICE_CUDA_HOST: i32 = 3;

/// `DLDataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct DLDataType {
    /// One of `DLDataTypeCode`, such as [`CODE_FLOAT`].
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// More than 1 for vectors.
    pub lanes: u16,
}

/// `kDLFloat`.
pub const CODE_FLOAT: u8 = 2;
/// `kDLBfloat`.
pub const CODE_BFLOAT: u8 = 4;
/// `kDLComplex`: bits of both parts.
pub const CODE_COMPLEX: u8 = 5;

/// `DLTensor`.
#[derive(Debug)]
#[repr(C)]
pub struct DLTensor {
    /// Where the allocation starts.
    pub data: *mut c_void,
    /// Whose memory it is.
    pub device: DLDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Type of the elements.
    pub dtype: DLDataType,
    /// `ndim` sizes.
    pub shape: *mut i64,
    /// `ndim` strides, counted in elements; NULL for row-major order.
    pub strides: *mut i64,
    /// From `data` to the first element.
    pub byte_offset: u64,
}

/// `DLManagedTensor`, of versions before 1.0.
#[derive(Debug)]
#[repr(C)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// To be called once by whoever consumes the tensor, when it is done with it.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// `DLManagedTensorVersioned`.
#[derive(Debug)]
#[repr(C)]
pub struct DLManagedTensorVersioned {
    /// What the rest is laid out like.
    pub version: DLPackVersion,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// To be called once by whoever consumes the tensor, when it is done with it.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// `DLPACK_FLAG_BITMASK_*`.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// `DLPackExchangeAPIHeader`.
#[derive(Debug)]
#[repr(C)]
pub struct DLPackExchangeAPIHeader {
    /// What the rest is laid out like.
    pub version: DLPackVersion,
    /// A table of an older major version, or NULL.
    pub prev_api: *mut DLPackExchangeAPIHeader,
}

/// `DLPackExchangeAPI`, of DLPack 1.3: how a producer of Python objects hands tensors over without making any.
#[derive(Debug)]
#[repr(C)]
pub struct DLPackExchangeAPI {
    /// Stable across versions.
    pub header: DLPackExchangeAPIHeader,
    /// Not used here.
    pub managed_tensor_allocator: *const c_void,
    /// Not used here.
    pub managed_tensor_from_py_object_no_sync: *const c_void,
    /// Not used here.
    pub managed_tensor_to_py_object_no_sync: *const c_void,
    /// Describes the tensor of an object of the producer's type, which stays its owner; the description holds until
    /// control returns to the producer. 0, or -1 with a Python exception set.
    pub dltensor_from_py_object_no_sync: Option<unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> i32>,
    /// Not used here.
    pub current_work_stream: *const c_void,
}

#[cfg(all(test, target_pointer_width = "64"))]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn layouts_are_those_of_the_header() {
        assert_eq!(size_of::<DLTensor>(), 48);
        let offsets = [
            offset_of!(DLTensor, device),
            offset_of!(DLTensor, ndim),
            offset_of!(DLTensor, dtype),
            offset_of!(DLTensor, shape),
            offset_of!(DLTensor, strides),
            offset_of!(DLTensor, byte_offset),
        ];
        assert_eq!(offsets, [8, 16, 20, 24, 32, 40]);
        assert_eq!((size_of::<DLManagedTensor>(), size_of::<DLManagedTensorVersioned>()), (64, 80));
        assert_eq!(offset_of!(DLManagedTensorVersioned, dl_tensor), 32);
        assert_eq!(offset_of!(DLPackExchangeAPI, dltensor_from_py_object_no_sync), 40);
    }
}
