//! The few operations that a compiler can't find in a plain loop, per instruction set.

use half::f16;

use super::scalar::{LANES, Scalar};

/// An instruction set. Its methods are correct only on a machine that has it: only the clone of a kernel that was
/// compiled for it may name it.
pub(super) trait Isa {
    fn widen_f16(block: [f16; LANES]) -> [f32; LANES];
    fn narrow_f16(block: [f32; LANES]) -> [f16; LANES];
}

/// What every machine of the target has.
pub(super) enum Baseline {}

impl Isa for Baseline {
    #[inline(always)]
    fn widen_f16(block: [f16; LANES]) -> [f32; LANES] {
        block.map(Scalar::widen)
    }

    #[inline(always)]
    fn narrow_f16(block: [f32; LANES]) -> [f16; LANES] {
        block.map(Scalar::narrow)
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256, __m256i, __m512, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm512_cvtph_ps,
        _mm512_cvtps_ph,
    };
    use std::mem::transmute;

    use super::{Isa, LANES, f16};

    /// AVX2 with F16C.
    pub(crate) enum Avx2 {}

    impl Isa for Avx2 {
        #[inline(always)]
        fn widen_f16(block: [f16; LANES]) -> [f32; LANES] {
            // SAFETY: the types have the same sizes and no invalid values; that the machine has F16C is established
            // by the dispatch, which hands out the clone this is inlined into only where it was detected.
            unsafe {
                let halves: [__m128i; 2] = transmute(block);
                let wide: [__m256; 2] = halves.map(|half| _mm256_cvtph_ps(half));
                transmute(wide)
            }
        }

        #[inline(always)]
        fn narrow_f16(block: [f32; LANES]) -> [f16; LANES] {
            // SAFETY: as above.
            unsafe {
                let halves: [__m256; 2] = transmute(block);
                let narrow: [__m128i; 2] = halves.map(|half| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(half));
                transmute(narrow)
            }
        }
    }

    /// AVX-512 F, BW, DQ and VL.
    pub(crate) enum Avx512 {}

    impl Isa for Avx512 {
        #[inline(always)]
        fn widen_f16(block: [f16; LANES]) -> [f32; LANES] {
            // SAFETY: as above, with AVX-512F.
            unsafe {
                let block: __m256i = transmute(block);
                let wide: __m512 = _mm512_cvtph_ps(block);
                transmute(wide)
            }
        }

        #[inline(always)]
        fn narrow_f16(block: [f32; LANES]) -> [f16; LANES] {
            // SAFETY: as above, with AVX-512F.
            unsafe {
                let block: __m512 = transmute(block);
                let narrow: __m256i = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(block);
                transmute(narrow)
            }
        }
    }
}
