//! The body of every kernel, once. The clones in `dispatch` inline it and let the compiler vectorise it.

use std::mem::MaybeUninit;

use super::isa::Isa;
use super::scalar::{LANES, Scalar, Wide};

/// What is found out about the elements of a chunk while they are read. A chunk may be read by several calls: all but
/// the last of them read a multiple of LANES elements.
pub(super) struct Moments<'a> {
    /// Sums of squares, element i in lane i % LANES; empty if they are not asked for.
    squares: &'a mut [f64],
    finite: bool,
}

impl<'a> Moments<'a> {
    /// `squares` is LANES zeros, or nothing.
    pub(super) fn new(squares: &'a mut [f64]) -> Self {
        Self { squares, finite: true }
    }

    pub(super) fn finite(&self) -> bool {
        self.finite
    }

    /// Adds the lanes up, always in this order.
    pub(super) fn sum_of_squares(self) -> f64 {
        let mut lanes = self.squares;
        while lanes.len() > 1 {
            let (lower, upper) = lanes.split_at_mut(lanes.len() / 2);
            lower.iter_mut().zip(upper).for_each(|(lower, upper)| *lower += *upper);
            lanes = lower;
        }
        lanes.first().copied().unwrap_or(0.0)
    }
}

/// What becomes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// They grow.
    Add,
    /// They are written.
    Write,
    /// They are written, and not read again soon.
    Stream,
}

const ADD: u8 = Mode::Add as u8;
const STREAM: u8 = Mode::Stream as u8;

/// `target = source * scale`, or `target += source * scale` if MODE is [`Mode::Add`]: the scale rounded to the sum's
/// type once, multiplication and addition rounded each.
///
/// # Safety
/// `source` is readable and `target` writable (readable too, for `Mode::Add`) for `len` elements; `target` is 64-byte
/// aligned, `source` need not be. They do not overlap. The machine has the instruction set I. `moments` has lanes if,
/// and only if, NORM asks for squares.
#[inline(always)]
pub(super) unsafe fn add<I: Isa, S: Scalar, T: Scalar, const MODE: u8, const NORM: bool>(
    target: *mut u8,
    source: *const u8,
    len: usize,
    scale: f64,
    moments: &mut Moments<'_>,
) {
    let scale = T::Wide::of(scale);
    let mut stage = [S::Wide::of(0.0); LANES];
    let mut sums = Sums([const { MaybeUninit::<T>::uninit() }; LANES]);
    let mut largest = S::Wide::ZERO;
    let run = if NORM || S::IS_STAGED || MODE == STREAM { LANES } else { len.max(1) };
    let mut start = 0;
    while start < len {
        let len = run.min(len - start);
        // SAFETY: `start + len` is within the length, and the rest is this function's contract. A whole run of sums is a
        // multiple of 64 bytes, so that each run starts on such a boundary.
        unsafe {
            let target = target.cast::<T>().add(start);
            let streams = MODE == STREAM && len == LANES;
            let place = if streams { sums.0.as_mut_ptr().cast::<T>() } else { target };
            let source = S::stage::<I>(source.cast::<S>().add(start), len, &mut stage);
            for i in 0..len {
                let value = source.add(i).read_unaligned().widen();
                largest = largest.max(value.magnitude());
                if NORM {
                    *moments.squares.get_unchecked_mut(i) += value.to_f64() * value.to_f64();
                }
                let term = T::Wide::of(value).multiply(scale);
                let sum = if MODE == ADD { place.add(i).read().widen().add(term) } else { term };
                place.add(i).write(T::narrow(sum));
            }
            if streams {
                I::stream(place.cast_const().cast(), target.cast(), size_of::<[T; LANES]>());
            }
        }
        start += run;
    }
    if MODE == STREAM {
        I::fence();
    }
    moments.finite &= largest < S::Wide::INFINITE;
}

/// A run of sums on its way past the caches.
#[repr(align(64))]
struct Sums<T>([MaybeUninit<T>; LANES]);

/// Reads only: finds the moments.
///
/// # Safety
/// `source` is readable for `len` elements. The machine has the instruction set I.
#[inline(always)]
pub(super) unsafe fn examine<I: Isa, S: Scalar, const NORM: bool>(
    source: *const u8,
    len: usize,
    moments: &mut Moments<'_>,
) {
    let mut stage = [S::Wide::of(0.0); LANES];
    let mut largest = S::Wide::ZERO;
    let run = if NORM || S::IS_STAGED { LANES } else { len.max(1) };
    let mut start = 0;
    while start < len {
        let len = run.min(len - start);
        // SAFETY: `start + len` is within the length, and the rest is this function's contract.
        unsafe {
            let source = S::stage::<I>(source.cast::<S>().add(start), len, &mut stage);
            for i in 0..len {
                let value = source.add(i).read_unaligned().widen();
                largest = largest.max(value.magnitude());
                if NORM {
                    *moments.squares.get_unchecked_mut(i) += value.to_f64() * value.to_f64();
                }
            }
        }
        start += run;
    }
    moments.finite &= largest < S::Wide::INFINITE;
}

/// `target = source * factor`, or `source / factor`, computed in f64 and rounded once.
///
/// # Safety
/// Both are aligned; `source` is readable and `target` writable for `len` elements. They are the same memory or do
/// not overlap.
#[inline(always)]
pub(super) unsafe fn scale<T: Scalar, const DIVIDE: bool>(target: *mut u8, source: *const u8, len: usize, factor: f64) {
    let (target, source) = (target.cast::<T>(), source.cast::<T>());
    for i in 0..len {
        // SAFETY: `i < len`, and the rest is this function's contract.
        unsafe {
            let value = source.add(i).read().widen().to_f64();
            target.add(i).write(T::from_f64(if DIVIDE { value / factor } else { value * factor }));
        }
    }
}
