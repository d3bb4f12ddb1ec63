//! One clone of each kernel per SIMD level, and the table of the level this process uses.

use std::sync::OnceLock;

use half::{bf16, f16};

use super::body::{self, ADD, EXAMINE, Mode, Moments, STREAM, WRITE};
use super::isa;
use super::scalar::Scalar;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SimdLevel {
    /// What every machine of the target has: SSE2 on x86-64.
    Scalar,
    /// NEON, which every AArch64 has.
    Neon,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl SimdLevel {
    /// Every level, the least first.
    pub const ALL: &[Self] = &[Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512];

    /// The name that the environment variable `GRADACC_SIMD` knows it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        Kernels::of(self).is_some()
    }
}

/// See [`body::add`].
pub(super) type Add = unsafe fn(*mut u8, *const u8, usize, f64, &mut Moments<'_>);
/// See [`body::scale`].
pub(super) type Scale = unsafe fn(*mut u8, *const u8, usize, f64);

/// The kernels of one level. The flags of a kernel are chosen here, once per tensor, never per element.
pub(super) struct Kernels {
    pub(super) level: SimdLevel,
    /// By dtype of the gradient and of the sums, what becomes of these, and whether squares are summed.
    add: fn(DType, DType, Mode, bool) -> Option<Add>,
    /// By dtype, and whether it divides.
    pub(super) scale: fn(DType, bool) -> Scale,
}

impl Kernels {
    /// The kernels of a level, if this machine has it.
    pub(super) fn of(level: SimdLevel) -> Option<&'static Self> {
        match level {
            SimdLevel::Scalar => Some(&scalar::KERNELS),
            #[cfg(target_arch = "aarch64")]
            SimdLevel::Neon => Some(&neon::KERNELS),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => {
                (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(&avx2::KERNELS)
            }
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => (is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("f16c"))
            .then_some(&avx512::KERNELS),
            _ => None,
        }
    }

    /// The kernels this process uses: chosen once, the best there is or those that `GRADACC_SIMD` names.
    pub(super) fn get() -> Result<&'static Self> {
        static CHOSEN: OnceLock<Result<&'static Kernels>> = OnceLock::new();
        CHOSEN.get_or_init(|| Self::choose(std::env::var_os("GRADACC_SIMD"))).clone()
    }

    fn choose(forced: Option<std::ffi::OsString>) -> Result<&'static Self> {
        let available = || SimdLevel::ALL.iter().copied().filter(|level| level.is_available());
        let names =
            |levels: &mut dyn Iterator<Item = SimdLevel>| levels.map(SimdLevel::name).collect::<Vec<_>>().join(", ");
        let level = match forced.filter(|name| !name.is_empty()) {
            None => available().max().unwrap_or(SimdLevel::Scalar),
            Some(name) => {
                let level = SimdLevel::ALL.iter().copied().find(|level| name == level.name());
                level.ok_or_else(|| {
                    let known = names(&mut SimdLevel::ALL.iter().copied());
                    Error::argument("GRADACC_SIMD", format!("expected one of {known}, got {name:?}"))
                })?
            }
        };
        Self::of(level).ok_or_else(|| {
            let reason = format!("this machine has no {}; it has {}", level.name(), names(&mut available()));
            Error::argument("GRADACC_SIMD", reason)
        })
    }

    /// None if the buffer does not take such gradients.
    pub(super) fn add(&self, source: DType, target: DType, mode: Mode, norm: bool) -> Option<Add> {
        (self.add)(source, target, mode, norm)
    }
}

/// The SIMD level this process uses.
///
/// # Errors
/// [`Error::Argument`] if the environment variable `GRADACC_SIMD` names a level that does not exist, or that this
/// machine lacks.
pub fn simd_level() -> Result<SimdLevel> {
    Ok(Kernels::get()?.level)
}

macro_rules! level {
    ($module:ident, $level:ident, $isa:ty $(, $features:literal)?) => {
        mod $module {
            use super::*;

            /// # Safety
            #[doc = "See [`body::add`]. The machine has the features."]
            $(#[target_feature(enable = $features)])?
            unsafe fn add<S: Scalar, T: Scalar, const MODE: u8, const NORM: bool>(
                target: *mut u8,
                source: *const u8,
                len: usize,
                scale: f64,
                moments: &mut Moments<'_>,
            ) {
                // SAFETY: the caller's contract is the same.
                unsafe { body::add::<$isa, S, T, MODE, NORM>(target, source, len, scale, moments) }
            }

            /// # Safety
            #[doc = "See [`body::scale`]. The machine has the features."]
            $(#[target_feature(enable = $features)])?
            unsafe fn scale<T: Scalar, const DIVIDE: bool>(target: *mut u8, source: *const u8, len: usize, factor: f64) {
                // SAFETY: the caller's contract is the same.
                unsafe { body::scale::<$isa, T, DIVIDE>(target, source, len, factor) }
            }

            fn flags<S: Scalar, T: Scalar>(mode: Mode, norm: bool) -> Option<Add> {
                Some(match (mode, norm) {
                    (Mode::Examine, false) => add::<S, T, EXAMINE, false>,
                    (Mode::Examine, true) => add::<S, T, EXAMINE, true>,
                    (Mode::Add, false) => add::<S, T, ADD, false>,
                    (Mode::Add, true) => add::<S, T, ADD, true>,
                    (Mode::Write, false) => add::<S, T, WRITE, false>,
                    (Mode::Write, true) => add::<S, T, WRITE, true>,
                    (Mode::Stream, false) => add::<S, T, STREAM, false>,
                    (Mode::Stream, true) => add::<S, T, STREAM, true>,
                })
            }

            pub(super) static KERNELS: Kernels = Kernels {
                level: SimdLevel::$level,
                add: |source, target, mode, norm| match (source, target) {
                    (DType::F16, DType::F16) => flags::<f16, f16>(mode, norm),
                    (DType::BF16, DType::BF16) => flags::<bf16, bf16>(mode, norm),
                    (DType::F16, DType::F32) => flags::<f16, f32>(mode, norm),
                    (DType::BF16, DType::F32) => flags::<bf16, f32>(mode, norm),
                    (DType::F32, DType::F32) => flags::<f32, f32>(mode, norm),
                    (DType::F64, DType::F32) => flags::<f64, f32>(mode, norm),
                    (DType::F16, DType::F64) => flags::<f16, f64>(mode, norm),
                    (DType::BF16, DType::F64) => flags::<bf16, f64>(mode, norm),
                    (DType::F32, DType::F64) => flags::<f32, f64>(mode, norm),
                    (DType::F64, DType::F64) => flags::<f64, f64>(mode, norm),
                    (_, DType::F16 | DType::BF16) | (DType::Complex64 | DType::Complex128, _) => None,
                    (_, DType::Complex64 | DType::Complex128) => None,
                },
                scale: |dtype, divide| match (dtype, divide) {
                    (DType::F16, false) => scale::<f16, false>,
                    (DType::F16, true) => scale::<f16, true>,
                    (DType::BF16, false) => scale::<bf16, false>,
                    (DType::BF16, true) => scale::<bf16, true>,
                    (DType::F32, false) => scale::<f32, false>,
                    (DType::F32, true) => scale::<f32, true>,
                    (DType::F64, false) => scale::<f64, false>,
                    (DType::F64, true) => scale::<f64, true>,
                    (DType::Complex64 | DType::Complex128, _) => panic!("buffers hold components"),
                },
            };
        }
    };
}

level!(scalar, Scalar, isa::Baseline);
#[cfg(target_arch = "aarch64")]
level!(neon, Neon, isa::Baseline, "neon");
#[cfg(target_arch = "x86_64")]
level!(avx2, Avx2, isa::Avx2, "avx2,f16c");
#[cfg(target_arch = "x86_64")]
level!(avx512, Avx512, isa::Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_can_be_forced_and_one_that_is_not_there_is_refused() {
        assert_eq!(Kernels::choose(Some("scalar".into())).unwrap().level, SimdLevel::Scalar);
        let best = SimdLevel::ALL.iter().copied().filter(|level| level.is_available()).max();
        assert_eq!(Kernels::choose(None).ok().map(|kernels| kernels.level), best);
        let message = Kernels::choose(Some("sse9".into())).err().unwrap().to_string();
        assert!(message.contains("scalar, neon, avx2, avx512") && message.contains("sse9"), "{message}");
    }
}
