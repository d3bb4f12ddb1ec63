//! The body of every kernel, once. The clones in `dispatch` inline it and let the compiler vectorise it.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::isa::{self, Isa};
use super::scalar::{LANES, Scalar, Wide};

/// Elements of a run: ROWS times all lanes, so that a sum of squares is loaded and stored once for ROWS of them.
pub(super) const RUN: usize = ROWS * LANES;
const ROWS: usize = 4;
/// Lanes of one loop within a run. Memory is asked for in between, and more at once would stall.
const STEP: usize = 64;

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
    /// There are none: the gradients are only read.
    Examine,
    /// They grow.
    Add,
    /// They are written.
    Write,
    /// They are written, and not read again soon.
    Stream,
}

pub(super) const EXAMINE: u8 = Mode::Examine as u8;
pub(super) const ADD: u8 = Mode::Add as u8;
pub(super) const WRITE: u8 = Mode::Write as u8;
pub(super) const STREAM: u8 = Mode::Stream as u8;

/// How far ahead memory is asked for, where there is so much that it can't be in a cache, and where the hardware alone
/// stops at every page.
const AHEAD_BYTES: usize = 4096;
const AHEAD_FROM: usize = 1 << 15;

/// Whether memory is asked for ahead of so many elements. Measured on memory-bound adds: Intel's server cores reach 7 to
/// 12 % more with it; on AMD's, which fetch across pages by themselves, they take 1.4 times as long.
fn is_far(len: usize) -> bool {
    len >= AHEAD_FROM && isa::is_intel()
}

/// A run of sums on its way past the caches.
#[repr(align(64))]
struct Sums<T>([MaybeUninit<T>; RUN]);

/// `target = source * scale`, or `target += source * scale` if MODE says so: the scale rounded to the sum's type once,
/// multiplication and addition rounded each. Or no target, and the source only read.
///
/// # Safety
/// `source` is readable for `len` elements, and need not be aligned. Unless MODE is EXAMINE, `target` is writable
/// (readable too, for ADD) for `len` elements and aligned, on 64 bytes for STREAM, and they do not overlap. The machine has the
/// instruction set I. `moments` has lanes if, and only if, NORM asks for squares.
#[inline(always)]
pub(super) unsafe fn add<I: Isa, S: Scalar, T: Scalar, const MODE: u8, const NORM: bool>(
    target: *mut u8,
    source: *const u8,
    len: usize,
    scale: f64,
    moments: &mut Moments<'_>,
) {
    let scale = T::Wide::of(scale);
    let mut stage = [S::Wide::of(0.0); RUN];
    let mut sums = Sums([const { MaybeUninit::<T>::uninit() }; RUN]);
    let mut largest = S::Wide::ZERO;
    let is_far = is_far(len);
    // A sum of squares is then loaded and stored once for all rows. It costs AMD's cores twice the time: they don't fetch
    // ahead for so many places at once. The sums are the same bits.
    let by_column = NORM && isa::is_intel();
    let run = if NORM || S::IS_STAGED || MODE == STREAM || is_far { RUN } else { len.max(1) };
    let mut start = 0;
    while start < len {
        let len = run.min(len - start);
        let target = target.cast::<T>().wrapping_add(start);
        let streams = MODE == STREAM && len == RUN;
        let place = if streams { sums.0.as_mut_ptr().cast::<T>() } else { target };
        // SAFETY: `start + len` is within the length, and the rest is this function's contract. A whole run of sums is a
        // multiple of 64 bytes, so that each run starts on such a boundary.
        unsafe {
            let source = source.cast::<S>().add(start);
            let staged = S::stage::<I>(source, len, &mut stage);
            if len == RUN && by_column {
                for first in (0..LANES).step_by(STEP) {
                    if is_far {
                        ahead::<I, S, T, MODE>(source.add(first * ROWS), target.wrapping_add(first * ROWS));
                    }
                    rows::<_, T, MODE, NORM, ROWS>(place, staged, first..first + STEP, scale, &mut largest, moments);
                }
            } else {
                let row = if NORM || is_far { LANES } else { len };
                let mut start = 0;
                while start < len {
                    if is_far {
                        ahead::<I, S, T, MODE>(source.add(start), target.wrapping_add(start));
                    }
                    let (place, staged) = (place.wrapping_add(start), staged.add(start));
                    let lanes = 0..row.min(len - start);
                    rows::<_, T, MODE, NORM, 1>(place, staged, lanes, scale, &mut largest, moments);
                    start += row;
                }
            }
            if streams {
                I::stream(place.cast_const().cast(), target.cast(), size_of::<[T; RUN]>());
            }
        }
        start += run;
    }
    if MODE == STREAM {
        I::fence();
    }
    moments.finite &= largest < S::Wide::INFINITE;
}

/// Asks for the memory of one step, some way ahead.
#[inline(always)]
fn ahead<I: Isa, S, T, const MODE: u8>(source: *const S, target: *const T) {
    prefetch::<I, S>(source);
    if MODE == ADD {
        prefetch::<I, T>(target);
    }
}

/// Asks for the elements of one step, some way ahead.
#[inline(always)]
fn prefetch<I: Isa, E>(elements: *const E) {
    I::prefetch(elements.cast::<u8>().wrapping_add(AHEAD_BYTES), ROWS * STEP * size_of::<E>());
}

/// The loop itself, over some lanes of each of R rows, which are LANES apart.
///
/// # Safety
/// As for [`add`], for these elements.
#[inline(always)]
unsafe fn rows<S: Scalar, T: Scalar, const MODE: u8, const NORM: bool, const R: usize>(
    target: *mut T,
    source: *const S,
    lanes: Range<usize>,
    scale: T::Wide,
    largest: &mut <S::Wide as Wide>::Bits,
    moments: &mut Moments<'_>,
) {
    for lane in lanes {
        // SAFETY: this function's contract; where squares are asked for, there is one for each lane.
        unsafe {
            let mut square = if NORM { *moments.squares.get_unchecked(lane) } else { 0.0 };
            for i in (0..R).map(|row| row * LANES + lane) {
                let value = source.add(i).read_unaligned().widen();
                *largest = (*largest).max(value.magnitude());
                if NORM {
                    square += value.to_f64() * value.to_f64();
                }
                if MODE != EXAMINE {
                    let term = T::Wide::of(value) * scale;
                    let sum = if MODE == ADD { target.add(i).read().widen() + term } else { term };
                    target.add(i).write(T::narrow(sum));
                }
            }
            if NORM {
                *moments.squares.get_unchecked_mut(lane) = square;
            }
        }
    }
}

/// `target = source * factor`, or `source / factor`, computed in f64 and rounded once.
///
/// # Safety
/// Both are aligned; `source` is readable and `target` writable for `len` elements. They are the same memory or do
/// not overlap. The machine has the instruction set I.
#[inline(always)]
pub(super) unsafe fn scale<I: Isa, T: Scalar, const DIVIDE: bool>(
    target: *mut u8,
    source: *const u8,
    len: usize,
    factor: f64,
) {
    let (target, source) = (target.cast::<T>(), source.cast::<T>());
    let apply = |value: T| {
        let value = value.widen().to_f64();
        T::from_f64(if DIVIDE { value / factor } else { value * factor })
    };
    let is_far = is_far(len);
    let step = if is_far { ROWS * STEP } else { len.max(1) };
    let mut start = 0;
    while start < len {
        let end = len.min(start + step);
        if is_far {
            prefetch::<I, T>(source.wrapping_add(start));
        }
        // SAFETY: `i < len`, and the rest is this function's contract. In place the loop is one of its own: compilers
        // do not vectorise it if two pointers may overlap.
        unsafe {
            if target.cast_const() == source {
                for i in start..end {
                    target.add(i).write(apply(target.add(i).read()));
                }
            } else {
                for i in start..end {
                    target.add(i).write(apply(source.add(i).read()));
                }
            }
        }
        start = end;
    }
}
