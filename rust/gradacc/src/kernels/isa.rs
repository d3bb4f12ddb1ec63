//! The few operations that a compiler can't find in a plain loop, per instruction set.

use half::f16;

use super::scalar::{LANES, Scalar};

/// An instruction set. Only the clone of a kernel that was compiled for it may name it.
pub(super) trait Isa {
    /// Widens `len` elements, at most LANES.
    ///
    /// # Safety
    /// `source` is readable for `len` elements, and need not be aligned. The machine has the instruction set.
    #[inline(always)]
    unsafe fn widen_f16(source: *const f16, len: usize, target: &mut [f32; LANES]) {
        // SAFETY: this function's contract.
        unsafe { widen_one_by_one(source, 0, len, target) }
    }
}

/// # Safety
/// `source` is readable for `end` elements.
#[inline(always)]
unsafe fn widen_one_by_one(source: *const f16, start: usize, end: usize, target: &mut [f32; LANES]) {
    for (i, target) in target.iter_mut().enumerate().take(end).skip(start) {
        // SAFETY: `i < end`.
        *target = unsafe { source.add(i).read_unaligned() }.widen();
    }
}

/// What every machine of the target has.
pub(super) enum Baseline {}

impl Isa for Baseline {}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm256_cvtph_ps, _mm256_loadu_si256, _mm256_storeu_ps, _mm512_cvtph_ps, _mm512_storeu_ps,
    };

    use super::{Isa, LANES, f16, widen_one_by_one};

    /// AVX2 with F16C.
    pub(crate) enum Avx2 {}

    impl Isa for Avx2 {
        #[inline(always)]
        unsafe fn widen_f16(source: *const f16, len: usize, target: &mut [f32; LANES]) {
            let (len, whole) = (len.min(LANES), len.min(LANES) / 8 * 8);
            // SAFETY: `i + 8 <= len`, at most LANES, and the rest is this function's contract.
            unsafe {
                for i in (0..whole).step_by(8) {
                    let wide = _mm256_cvtph_ps(_mm_loadu_si128(source.add(i).cast()));
                    _mm256_storeu_ps(target.as_mut_ptr().add(i), wide);
                }
                widen_one_by_one(source, whole, len, target);
            }
        }
    }

    /// AVX-512 F, BW, DQ and VL.
    pub(crate) enum Avx512 {}

    impl Isa for Avx512 {
        #[inline(always)]
        unsafe fn widen_f16(source: *const f16, len: usize, target: &mut [f32; LANES]) {
            let (len, whole) = (len.min(LANES), len.min(LANES) / 16 * 16);
            // SAFETY: `i + 16 <= len`, at most LANES, and the rest is this function's contract.
            unsafe {
                for i in (0..whole).step_by(16) {
                    let wide = _mm512_cvtph_ps(_mm256_loadu_si256(source.add(i).cast()));
                    _mm512_storeu_ps(target.as_mut_ptr().add(i), wide);
                }
                widen_one_by_one(source, whole, len, target);
            }
        }
    }
}
