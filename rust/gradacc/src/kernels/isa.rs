//! The few operations that a compiler can't find in a plain loop, per instruction set.

use half::f16;

use super::body::RUN;
use super::scalar::Scalar;

/// An instruction set. Only the clone of a kernel that was compiled for it may name it.
pub(super) trait Isa {
    /// Widens `len` elements, at most RUN.
    ///
    /// # Safety
    /// `source` is readable for `len` elements, and need not be aligned. The machine has the instruction set.
    #[inline(always)]
    unsafe fn widen_f16(source: *const f16, len: usize, target: &mut [f32; RUN]) {
        // SAFETY: this function's contract.
        unsafe { widen_one_by_one(source, 0, len, target) }
    }

    /// Copies past the caches, where there is a way: the target is not read first, nor does it take anybody's place.
    ///
    /// # Safety
    /// `source` is readable and `target` writable for `len_bytes`, a multiple of 64; `target` is 64-byte aligned. They do
    /// not overlap. The machine has the instruction set. [`fence`](Self::fence) comes before others may read.
    #[inline(always)]
    unsafe fn stream(source: *const u8, target: *mut u8, len_bytes: usize) {
        // SAFETY: this function's contract; every x86-64 has SSE2.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            for i in (0..len_bytes).step_by(16) {
                use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
                _mm_stream_si128(target.add(i).cast(), _mm_loadu_si128(source.add(i).cast()));
            }
            #[cfg(not(target_arch = "x86_64"))]
            std::ptr::copy_nonoverlapping(source, target, len_bytes);
        }
    }

    /// Asks for memory that will be read soon. It need not be there.
    #[inline(always)]
    fn prefetch(memory: *const u8, len_bytes: usize) {
        #[cfg(target_arch = "x86_64")]
        for i in (0..len_bytes).step_by(64) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: every x86-64 has SSE, and a prefetch of any address is a hint.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(memory.wrapping_add(i).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (memory, len_bytes);
    }

    /// Makes what was streamed visible to whoever synchronises with this thread.
    #[inline(always)]
    fn fence() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every x86-64 has SSE.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

/// # Safety
/// `source` is readable for `end` elements.
#[inline(always)]
unsafe fn widen_one_by_one(source: *const f16, start: usize, end: usize, target: &mut [f32; RUN]) {
    for (i, target) in target.iter_mut().enumerate().take(end).skip(start) {
        // SAFETY: `i < end`.
        *target = unsafe { source.add(i).read_unaligned() }.widen();
    }
}

/// Whether this is a processor of Intel's.
pub(super) fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static IS_INTEL: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        *IS_INTEL.get_or_init(|| {
            // The vendor's name, in the order of the registers.
            let vendor = std::arch::x86_64::__cpuid(0);
            [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
        })
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// What every machine of the target has.
pub(super) enum Baseline {}

impl Isa for Baseline {}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm256_cvtph_ps, _mm256_loadu_si256, _mm256_storeu_ps, _mm256_stream_si256, _mm512_cvtph_ps,
        _mm512_loadu_si512, _mm512_storeu_ps, _mm512_stream_si512,
    };

    use super::{Isa, RUN, f16, widen_one_by_one};

    /// AVX2 with F16C.
    pub(crate) enum Avx2 {}

    impl Isa for Avx2 {
        #[inline(always)]
        unsafe fn widen_f16(source: *const f16, len: usize, target: &mut [f32; RUN]) {
            let (len, whole) = (len.min(RUN), len.min(RUN) / 8 * 8);
            // SAFETY: `i + 8 <= len`, at most RUN, and the rest is this function's contract.
            unsafe {
                for i in (0..whole).step_by(8) {
                    let wide = _mm256_cvtph_ps(_mm_loadu_si128(source.add(i).cast()));
                    _mm256_storeu_ps(target.as_mut_ptr().add(i), wide);
                }
                widen_one_by_one(source, whole, len, target);
            }
        }

        #[inline(always)]
        unsafe fn stream(source: *const u8, target: *mut u8, len_bytes: usize) {
            for i in (0..len_bytes).step_by(32) {
                // SAFETY: this function's contract.
                unsafe { _mm256_stream_si256(target.add(i).cast(), _mm256_loadu_si256(source.add(i).cast())) };
            }
        }
    }

    /// AVX-512 F, BW, DQ and VL.
    pub(crate) enum Avx512 {}

    impl Isa for Avx512 {
        #[inline(always)]
        unsafe fn widen_f16(source: *const f16, len: usize, target: &mut [f32; RUN]) {
            let (len, whole) = (len.min(RUN), len.min(RUN) / 16 * 16);
            // SAFETY: `i + 16 <= len`, at most RUN, and the rest is this function's contract.
            unsafe {
                for i in (0..whole).step_by(16) {
                    let wide = _mm512_cvtph_ps(_mm256_loadu_si256(source.add(i).cast()));
                    _mm512_storeu_ps(target.as_mut_ptr().add(i), wide);
                }
                widen_one_by_one(source, whole, len, target);
            }
        }

        #[inline(always)]
        unsafe fn stream(source: *const u8, target: *mut u8, len_bytes: usize) {
            for i in (0..len_bytes).step_by(64) {
                // SAFETY: this function's contract.
                unsafe { _mm512_stream_si512(target.add(i).cast(), _mm512_loadu_si512(source.add(i).cast())) };
            }
        }
    }
}
