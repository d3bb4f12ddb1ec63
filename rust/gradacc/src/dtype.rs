//! Element types: the closed list of what a tensor may hold.

use std::fmt;
use std::str::FromStr;

use bytemuck::Pod;
use half::{bf16, f16};

use crate::error::TensorError;

/// The type of a tensor's elements, by its name in NumPy and PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
}

impl DType {
    /// Every dtype there is.
    pub const ALL: &[Self] = &[Self::F16, Self::BF16, Self::F32, Self::F64];

    /// Bytes of one element.
    pub const fn len_bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The name NumPy and PyTorch use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
        }
    }

    /// The dtype that gradients of this one are summed in unless another is asked for: f64 for f64, f32 for the rest.
    pub const fn accumulation(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }

    /// The dtypes of gradients that a buffer of this dtype takes: a 16-bit buffer its own, the others all.
    pub fn accepts(self) -> &'static [Self] {
        match self {
            Self::F16 => &[Self::F16],
            Self::BF16 => &[Self::BF16],
            Self::F32 | Self::F64 => Self::ALL,
        }
    }

    /// Whether a buffer of this dtype takes gradients of another.
    pub fn takes(self, gradient: Self) -> bool {
        self == gradient || matches!(self, Self::F32 | Self::F64)
    }

    pub(crate) fn names(dtypes: &[Self]) -> String {
        dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = TensorError;

    fn from_str(name: &str) -> Result<Self, TensorError> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name).ok_or_else(|| TensorError::unsupported(name))
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// A Rust type that a [`DType`] stands for. Sealed: the list is closed.
pub trait Element: Pod + Send + Sync + fmt::Debug + sealed::Sealed {
    /// Its dtype.
    const DTYPE: DType;
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
}
