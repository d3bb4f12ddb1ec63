//! Element types: the closed list of what a tensor may hold.

use std::fmt;
use std::str::FromStr;

use bytemuck::Pod;
use half::{bf16, f16};

use crate::error::{Error, Result, TensorError};

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
    /// Complex numbers: a pair of binary32, the real part first.
    Complex64,
    /// Complex numbers: a pair of binary64, the real part first.
    Complex128,
}

impl DType {
    /// Every dtype there is.
    pub const ALL: &[Self] = &[Self::F16, Self::BF16, Self::F32, Self::F64, Self::Complex64, Self::Complex128];

    /// Bytes of one element.
    pub const fn len_bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::F64 | Self::Complex64 => 8,
            Self::Complex128 => 16,
        }
    }

    /// The name NumPy and PyTorch use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::Complex64 => "complex64",
            Self::Complex128 => "complex128",
        }
    }

    /// Whether its elements are complex: pairs of numbers of its [`component`](Self::component).
    pub const fn is_complex(self) -> bool {
        matches!(self, Self::Complex64 | Self::Complex128)
    }

    /// The dtype of the two parts of a complex number; of a real dtype, itself.
    pub const fn component(self) -> Self {
        match self {
            Self::Complex64 => Self::F32,
            Self::Complex128 => Self::F64,
            real => real,
        }
    }

    /// Components of one element: 2 if it is complex.
    pub(crate) const fn components(self) -> usize {
        if self.is_complex() { 2 } else { 1 }
    }

    /// The dtype that gradients of this one are summed in unless another is asked for: f64 for f64, f32 for the rest.
    /// Of complex ones, the components are.
    pub const fn accumulation(self) -> Self {
        match self.component() {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }

    /// What numbers are called whose components lie in a buffer of this dtype; None if there is no such dtype.
    pub(crate) const fn of_components(self, is_complex: bool) -> Option<Self> {
        match (self, is_complex) {
            (Self::F32, true) => Some(Self::Complex64),
            (Self::F64, true) => Some(Self::Complex128),
            (_, true) => None,
            (real, false) => Some(real),
        }
    }

    /// Whether a buffer of this real dtype takes the components of another: a 16-bit one its own, the others all.
    pub fn takes(self, gradient: Self) -> bool {
        self == gradient || matches!(self, Self::F32 | Self::F64)
    }

    /// Whether gradients may be multiplied with a scale on their way into a buffer of this dtype, to which it is rounded.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if it exceeds the range of float32, unless this is float64.
    pub fn check_scale(self, scale: f64) -> Result<()> {
        if self != Self::F64 && !(scale as f32).is_finite() {
            return Err(Error::argument("scale", format!("{scale} exceeds the largest number of float32")));
        }
        Ok(())
    }

    /// The dtypes of gradients that a buffer of this dtype takes, for messages.
    pub(crate) fn accepted(self, is_complex: bool) -> String {
        let accepted = |dtype: &Self| dtype.is_complex() == is_complex && self.takes(*dtype);
        Self::names(&Self::ALL.iter().copied().filter(accepted).collect::<Vec<_>>())
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
    impl Sealed for [f32; 2] {}
    impl Sealed for [f64; 2] {}
}

/// A Rust type that a [`DType`] stands for; a complex number is a pair. Sealed: the list is closed.
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

impl Element for [f32; 2] {
    const DTYPE: DType = DType::Complex64;
}

impl Element for [f64; 2] {
    const DTYPE: DType = DType::Complex128;
}
