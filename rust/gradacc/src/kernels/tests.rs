//! Every kernel on every level this machine has, against arithmetic written out element by element.

use half::{bf16, f16};

use super::body::{Mode, Moments};
use super::dispatch::{Kernels, SimdLevel};
use super::scalar::{LANES, Scalar, Wide};
use crate::dtype::Element;

/// Numbers of every kind, and a few thousand ordinary ones.
fn numbers(count: usize) -> Vec<f64> {
    let special = [0.0, -0.0, 1e-45, -1e-41, 6e-8, f64::MIN_POSITIVE, 65504.0, 3e38, -1.5, 1.0 / 3.0];
    let mut state = 1_u64;
    let mut ordinary = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64 * 8.0 - 4.0
    };
    (0..count).map(|i| if i % 7 == 3 { special[i / 7 % special.len()] } else { ordinary() }).collect()
}

fn of<T: Scalar>(values: &[f64]) -> Vec<T> {
    values.iter().map(|&value| T::from_f64(value)).collect()
}

/// Elements on a 64-byte boundary, as slots are.
struct Aligned<T: Scalar> {
    memory: Vec<[u64; 8]>,
    len: usize,
    elements: std::marker::PhantomData<T>,
}

impl<T: Scalar> Aligned<T> {
    fn new(elements: &[T]) -> Self {
        // One more than needed, and the first on a boundary found below.
        let mut memory = vec![[0; 8]; size_of_val(elements).div_ceil(64) + 2];
        let shift = memory.as_ptr().cast::<u8>().align_offset(64);
        bytemuck::cast_slice_mut::<_, u8>(&mut memory)[shift..][..size_of_val(elements)]
            .copy_from_slice(bytemuck::cast_slice(elements));
        Self { memory, len: elements.len(), elements: std::marker::PhantomData }
    }

    fn start(&self) -> usize {
        self.memory.as_ptr().cast::<u8>().align_offset(64)
    }

    fn get(&self) -> &[T] {
        let bytes = &bytemuck::cast_slice::<_, u8>(&self.memory)[self.start()..];
        bytemuck::cast_slice(&bytes[..self.len * size_of::<T>()])
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        let start = self.start();
        bytemuck::cast_slice_mut::<_, u8>(&mut self.memory)[start..].as_mut_ptr()
    }
}

/// Equal bits, or both NaN.
fn assert_same<T: Scalar>(got: &[T], expected: &[T], what: &str) {
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let is_nan = |value: &T| value.widen().to_f64().is_nan();
        let same = bytemuck::bytes_of(got) == bytemuck::bytes_of(expected) || (is_nan(got) && is_nan(expected));
        assert!(same, "{what}, element {i}: {got:?} instead of {expected:?}");
    }
}

/// What the sum of squares must be, in the order that is promised: lanes, then a tree over them.
fn promised_sum_of_squares<S: Scalar>(source: &[S]) -> f64 {
    let mut lanes = [0.0; LANES];
    for (i, value) in source.iter().enumerate() {
        let value = value.widen().to_f64();
        lanes[i % LANES] += value * value;
    }
    for width in [128, 64, 32, 16, 8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

fn each_level(mut test: impl FnMut(&'static Kernels, &str)) {
    for &level in SimdLevel::ALL {
        if let Some(kernels) = Kernels::of(level) {
            test(kernels, level.name());
        }
    }
}

/// Lengths with every kind of tail, at every alignment of the source; and one that is prefetched.
const LENGTHS: [usize; 71] = {
    let mut lengths = [4099; 71];
    let mut i = 0;
    while i < 68 {
        lengths[i] = i;
        i += 1;
    }
    lengths[68] = 1024;
    lengths[69] = (1 << 15) + 2 * 1024 + 300;
    lengths
};

fn check_add<S: Scalar, T: Scalar>() {
    let (values, before) = (of::<S>(&numbers(40_000)), of::<T>(&numbers(44_000)[4000..]));
    let widened = |value: S| T::Wide::of(value.widen());
    each_level(|kernels, level| {
        for len in LENGTHS {
            for offset in 0..if len > 100 { 2 } else { 4 } {
                for (mode, norm, scale) in [
                    (Mode::Write, false, 1.0),
                    (Mode::Add, false, 1.0),
                    (Mode::Add, true, 0.3),
                    (Mode::Write, true, -7.1),
                    (Mode::Stream, false, 0.7),
                    (Mode::Stream, true, 1.0),
                ] {
                    let source = &values[offset..offset + len];
                    let scaled = T::Wide::of(scale);
                    let expected: Vec<T> = source
                        .iter()
                        .zip(&before)
                        .map(|(&value, &before)| {
                            let term = widened(value) * scaled;
                            T::narrow(if mode == Mode::Add { before.widen() + term } else { term })
                        })
                        .collect();
                    let mut target = Aligned::new(&before[..len]);
                    let mut squares = if norm { vec![0.0; LANES] } else { vec![] };
                    let mut moments = Moments::new(&mut squares);
                    let add = kernels.add(S::DTYPE, T::DTYPE, mode, norm).unwrap();
                    // SAFETY: both hold `len` elements of these dtypes and are different Vecs; the level is there.
                    unsafe {
                        add(target.as_mut_ptr(), source.as_ptr().cast(), len, scale, &mut moments);
                    }
                    let what = format!("{level}: {} += {} × {scale}, len {len}, {mode:?}", T::DTYPE, S::DTYPE);
                    assert_same(target.get(), &expected, &what);
                    let finite = source.iter().all(|value| value.widen().to_f64().is_finite());
                    assert_eq!(moments.finite(), finite, "{what}");
                    if norm {
                        let promised = promised_sum_of_squares(source);
                        assert_eq!(moments.sum_of_squares().to_bits(), promised.to_bits(), "{what}");
                    }
                }
            }
        }
    });
}

#[test]
fn add_is_two_roundings_in_every_pair_of_dtypes() {
    check_add::<f16, f32>();
    check_add::<bf16, f32>();
    check_add::<f32, f32>();
    check_add::<f64, f32>();
    check_add::<f16, f64>();
    check_add::<bf16, f64>();
    check_add::<f32, f64>();
    check_add::<f64, f64>();
    check_add::<f16, f16>();
    check_add::<bf16, bf16>();
}

fn check_finite<S: Scalar>() {
    each_level(|kernels, level| {
        for len in LENGTHS {
            let mut values = of::<S>(&vec![1.0; len]);
            for position in [0, len / 2, len.saturating_sub(1)] {
                for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                    if len > 0 {
                        values[position] = S::from_f64(bad);
                    }
                    for norm in [false, true] {
                        let mut squares = if norm { vec![0.0; LANES] } else { vec![] };
                        let mut moments = Moments::new(&mut squares);
                        let examine = kernels.add(S::DTYPE, S::DTYPE, Mode::Examine, norm).unwrap();
                        // SAFETY: `values` holds `len` elements of this dtype; the level is there.
                        unsafe { examine(std::ptr::null_mut(), values.as_ptr().cast(), len, 1.0, &mut moments) };
                        assert_eq!(moments.finite(), len == 0, "{level}, {} {bad} at {position} of {len}", S::DTYPE);
                    }
                    if len > 0 {
                        values[position] = S::from_f64(1.0);
                    }
                }
            }
        }
    });
}

#[test]
fn nothing_nonfinite_is_overlooked() {
    check_finite::<f16>();
    check_finite::<bf16>();
    check_finite::<f32>();
    check_finite::<f64>();
}

#[test]
fn a_sum_of_squares_that_overflows_is_still_of_finite_numbers() {
    each_level(|kernels, level| {
        let (values, mut squares) = ([1e200_f64; 40], [0.0; LANES]);
        let mut moments = Moments::new(&mut squares);
        let examine = kernels.add(f64::DTYPE, f64::DTYPE, Mode::Examine, true).unwrap();
        // SAFETY: 40 elements of this dtype; the level is there.
        unsafe { examine(std::ptr::null_mut(), values.as_ptr().cast(), 40, 1.0, &mut moments) };
        assert!(moments.finite() && moments.sum_of_squares() == f64::INFINITY, "{level}");
    });
}

fn check_scale<T: Scalar>() {
    let mut values = numbers(40_000);
    values[11] = f64::NAN;
    values[12] = f64::NEG_INFINITY;
    let values = of::<T>(&values);
    each_level(|kernels, level| {
        for len in LENGTHS {
            for (divide, factor) in [(false, 1.0 / 3.0), (true, 49.0), (false, 0.0)] {
                let apply = |value: &T| {
                    let value = value.widen().to_f64();
                    T::from_f64(if divide { value / factor } else { value * factor })
                };
                let expected: Vec<T> = values[..len].iter().map(apply).collect();
                let what = format!("{level}: {} by {factor}, divided: {divide}, len {len}", T::DTYPE);
                let (mut elsewhere, mut in_place) = (vec![T::from_f64(9.0); len], values[..len].to_vec());
                let scale = (kernels.scale)(T::DTYPE, divide);
                // SAFETY: all hold `len` elements of this dtype; the level is there.
                unsafe {
                    scale(elsewhere.as_mut_ptr().cast(), values.as_ptr().cast(), len, factor);
                    let same = in_place.as_mut_ptr().cast();
                    scale(same, same, len, factor);
                }
                assert_same(&elsewhere, &expected, &what);
                assert_same(&in_place, &expected, &what);
            }
        }
    });
}

#[test]
fn a_factor_is_applied_in_f64_and_rounded_once() {
    check_scale::<f16>();
    check_scale::<bf16>();
    check_scale::<f32>();
    check_scale::<f64>();
}
