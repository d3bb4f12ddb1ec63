//! The arithmetic of one element, for every dtype.

use std::ops::{Add, Mul};

use half::{bf16, f16};

use super::body::RUN;
use super::isa::Isa;
use crate::dtype::Element;

/// Lanes of a sum of squares: element i of a chunk belongs to lane i % LANES on every SIMD level, so that the sum is the
/// same bits everywhere. So many that a loop over them is one that compilers vectorise.
pub(super) const LANES: usize = 256;

/// What sums are computed in.
pub(super) trait Wide: Copy + Add<Output = Self> + Mul<Output = Self> {
    /// Signed, since not every instruction set has a maximum of unsigned ones.
    type Bits: Copy + Ord;

    /// The magnitude of infinity; those above it are NaN.
    const INFINITE: Self::Bits;
    const ZERO: Self::Bits;

    /// The bits without the sign.
    fn magnitude(self) -> Self::Bits;
    fn to_f32(self) -> f32;
    fn to_f64(self) -> f64;
    /// Exact, or rounded to nearest even.
    fn of(value: impl Wide) -> Self;
}

impl Wide for f32 {
    type Bits = i32;

    const INFINITE: i32 = 0x7f80_0000;
    const ZERO: i32 = 0;

    #[inline(always)]
    fn magnitude(self) -> i32 {
        (self.to_bits() & 0x7fff_ffff) as i32
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self.into()
    }

    #[inline(always)]
    fn of(value: impl Wide) -> Self {
        value.to_f32()
    }
}

impl Wide for f64 {
    type Bits = i64;

    const INFINITE: i64 = 0x7ff0_0000_0000_0000;
    const ZERO: i64 = 0;

    #[inline(always)]
    fn magnitude(self) -> i64 {
        (self.to_bits() & 0x7fff_ffff_ffff_ffff) as i64
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn of(value: impl Wide) -> Self {
        value.to_f64()
    }
}

/// An element as the kernels see it.
pub(super) trait Scalar: Element {
    type Wide: Wide;
    /// What a run of elements is read as: themselves, unless an instruction set has a better way to widen them.
    type Staged: Scalar<Wide = Self::Wide>;

    /// Whether they are widened into a stage first, a run at a time.
    const IS_STAGED: bool;

    /// Exact.
    fn widen(self) -> Self::Wide;
    /// Rounds to nearest even; NaN stays NaN.
    fn narrow(wide: Self::Wide) -> Self;
    /// Rounds once, to nearest even; NaN stays NaN.
    fn from_f64(value: f64) -> Self;

    /// # Safety
    /// `source` is readable for `len` elements, of which there are at most RUN if they are staged. The machine has
    /// the instruction set I.
    unsafe fn stage<I: Isa>(source: *const Self, len: usize, stage: &mut [Self::Wide; RUN]) -> *const Self::Staged;
}

macro_rules! read_as_they_are {
    () => {
        type Staged = Self;

        const IS_STAGED: bool = false;

        #[inline(always)]
        unsafe fn stage<I: Isa>(source: *const Self, _: usize, _: &mut [Self::Wide; RUN]) -> *const Self {
            source
        }
    };
}

impl Scalar for f32 {
    type Wide = f32;

    read_as_they_are!();

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        wide
    }

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl Scalar for f64 {
    type Wide = f64;

    read_as_they_are!();

    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }

    #[inline(always)]
    fn narrow(wide: f64) -> Self {
        wide
    }

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        value
    }
}

impl Scalar for bf16 {
    type Wide = f32;

    read_as_they_are!();

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        let bits = wide.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // The addition would carry a NaN over into a number; setting the quiet bit can't.
        let bits = if wide.is_nan() { bits | 0x40_0000 } else { rounded };
        Self::from_bits((bits >> 16) as u16)
    }

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        Self::from_f64(value)
    }
}

impl Scalar for f16 {
    type Wide = f32;
    type Staged = f32;

    const IS_STAGED: bool = true;

    /// Puts exponent and mantissa where an f32 has them and corrects the exponent by a multiplication, which turns
    /// subnormal numbers into normal ones, exactly. No branches, so that it vectorises.
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7fff) << 13;
        let value = f32::from_bits(magnitude) * f32::from_bits((254 - 15) << 23);
        let is_special = bits & 0x7c00 == 0x7c00;
        let special = if is_special { 0x7f80_0000 } else { 0 };
        f32::from_bits(value.to_bits() | special | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        Self::from_f32(wide)
    }

    #[inline(always)]
    fn from_f64(value: f64) -> Self {
        Self::from_f64(value)
    }

    #[inline(always)]
    unsafe fn stage<I: Isa>(source: *const Self, len: usize, stage: &mut [f32; RUN]) -> *const f32 {
        // SAFETY: this function's contract.
        unsafe { I::widen_f16(source, len, stage) };
        stage.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_number_widens_exactly() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            let pairs = [(Scalar::widen(half), half.to_f64()), (Scalar::widen(brain), brain.to_f64())];
            for (got, expected) in pairs {
                assert!(f64::from(got) == expected || (got.is_nan() && expected.is_nan()), "{bits:#06x}");
                assert_eq!(got.is_sign_negative(), expected.is_sign_negative(), "{bits:#06x}");
            }
            for (got, expected) in pairs {
                assert_eq!(got.magnitude() < f32::INFINITE, expected.is_finite(), "{bits:#06x}");
            }
        }
    }

    #[test]
    fn bf16_narrows_to_nearest_even() {
        let ulp = 2.0_f32.powi(-7);
        for (wide, expected) in [
            (1.0 + 0.5 * ulp, 1.0),
            (1.0 + 1.5 * ulp, 1.0 + 2.0 * ulp),
            (-1.0 - 0.51 * ulp, -1.0 - ulp),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
            (f32::from_bits(1), 0.0),
        ] {
            assert_eq!(<bf16 as Scalar>::narrow(wide).to_f32(), expected, "{wide}");
        }
        for nan in [f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
            assert!(<bf16 as Scalar>::narrow(nan).is_nan());
        }
    }
}
