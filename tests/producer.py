"""A DLPack producer over memory of NumPy, by the C structs, to make tensors that no library would."""

import ctypes

import numpy as np

FLOAT, BFLOAT, INT = 2, 4, 0


class Tensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Legacy(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


alive: dict[int, tuple] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def delete(address):
    alive.pop(address)


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def capsule(
    array, *, versioned, major=1, code=FLOAT, bits=None, shape=None, strides=None, device=1, ndim=None, data=None
):
    """A capsule of a tensor over the memory of an array; `alive` holds it until its deleter is called."""
    shape = array.shape if shape is None else shape
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    steps = None if strides is None else (ctypes.c_int64 * max(len(strides), 1))(*strides)
    tensor = Tensor(
        array.ctypes.data if data is None else data,
        device,
        0,
        len(shape) if ndim is None else ndim,
        code,
        array.itemsize * 8 if bits is None else bits,
        1,
        ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64)),
        ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64)),
        0,
    )
    deleter = ctypes.cast(delete, ctypes.c_void_p)
    managed = Versioned(major, 0, None, deleter, 0, tensor) if versioned else Legacy(tensor, None, deleter)
    alive[ctypes.addressof(managed)] = array, managed, sizes, steps
    return new_capsule(ctypes.addressof(managed), b"dltensor_versioned" if versioned else b"dltensor", None)


class Producer:
    """An object with `__dlpack__`, of before or after DLPack 1.0."""

    def __init__(self, array, *, versioned=True, **options):
        self.array, self.versioned, self.options = array, versioned, options
        if not versioned:
            self.__class__ = OldProducer

    def __dlpack_device__(self):
        return self.options.get("device", 1), 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return capsule(self.array, versioned=max_version is not None, **self.options)


class OldProducer(Producer):
    """It knows of no versions."""

    def __dlpack__(self, stream=None):
        return capsule(self.array, versioned=False, **self.options)


def bf16_bits(values):
    """The upper halves of float32 numbers that bfloat16 can represent."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
