//! The body of every kernel, once. The clones in `dispatch` inline it and let the compiler vectorise it.

use super::isa::Isa;
use super::scalar::{LANES, Scalar, Wide};

/// What is found out about the elements of a chunk while they are read.
pub(super) struct Moments {
    /// Sums of squares, element i in lane i % LANES.
    squares: [f64; LANES],
    finite: bool,
}

impl Moments {
    pub(super) fn new() -> Self {
        Self { squares: [0.0; LANES], finite: true }
    }

    pub(super) fn finite(&self) -> bool {
        self.finite
    }

    /// Adds the lanes up, always in this order.
    pub(super) fn sum_of_squares(&self) -> f64 {
        let mut lanes = self.squares;
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        lanes[0]
    }
}

/// Running moments of elements of type S, in registers.
struct Running<S: Scalar, const NORM: bool> {
    squares: [f64; LANES],
    largest: [S::Bits; LANES],
}

impl<S: Scalar, const NORM: bool> Running<S, NORM> {
    #[inline(always)]
    fn resume(moments: &Moments) -> Self {
        Self { squares: moments.squares, largest: [S::ZERO; LANES] }
    }

    #[inline(always)]
    fn see_block(&mut self, source: &[S; LANES], wide: &[S::Wide; LANES]) {
        for lane in 0..LANES {
            self.largest[lane] = self.largest[lane].max(source[lane].magnitude());
            if NORM {
                let value = wide[lane].to_f64();
                self.squares[lane] += value * value;
            }
        }
    }

    #[inline(always)]
    fn see(&mut self, lane: usize, source: S) {
        self.largest[lane] = self.largest[lane].max(source.magnitude());
        if NORM {
            let value = source.widen().to_f64();
            self.squares[lane] += value * value;
        }
    }

    #[inline(always)]
    fn store(self, moments: &mut Moments) {
        moments.finite &= self.largest.iter().all(|&largest| largest < S::INFINITE);
        if NORM {
            moments.squares = self.squares;
        }
    }
}

/// `target = source * scale`, or `target += source * scale`: the scale rounded to the sum's type once, multiplication
/// and addition rounded each.
///
/// # Safety
/// `source` is readable and `target` writable (readable too, unless WRITE) for `len` elements; `target` is aligned,
/// `source` need not be. They do not overlap. All but the last call on one chunk have a `len` that is a multiple of
/// LANES. The machine has the instruction set I.
#[inline(always)]
pub(super) unsafe fn add<I: Isa, S: Scalar, T: Scalar, const WRITE: bool, const NORM: bool>(
    target: *mut u8,
    source: *const u8,
    len: usize,
    scale: f64,
    moments: &mut Moments,
) {
    let (target, source) = (target.cast::<T>(), source.cast::<S>());
    let scale = T::Wide::of(scale);
    let mut running = Running::<S, NORM>::resume(moments);
    let whole = len - len % LANES;
    let mut i = 0;
    while i < whole {
        // SAFETY: `i + LANES <= len`, and the rest is this function's contract.
        unsafe {
            let block = source.add(i).cast::<[S; LANES]>().read_unaligned();
            let wide = S::widen_block::<I>(block);
            running.see_block(&block, &wide);
            let place = target.add(i).cast::<[T; LANES]>();
            let mut sums = wide.map(|value| T::Wide::of(value).multiply(scale));
            if !WRITE {
                let before = T::widen_block::<I>(place.read());
                for lane in 0..LANES {
                    sums[lane] = before[lane].add(sums[lane]);
                }
            }
            place.write(T::narrow_block::<I>(sums));
        }
        i += LANES;
    }
    while i < len {
        // SAFETY: `i < len`, and the rest is this function's contract.
        unsafe {
            let value = source.add(i).read_unaligned();
            running.see(i % LANES, value);
            let term = T::Wide::of(value.widen()).multiply(scale);
            let sum = if WRITE { term } else { target.add(i).read().widen().add(term) };
            target.add(i).write(T::narrow(sum));
        }
        i += 1;
    }
    running.store(moments);
}

/// Reads only: finds the moments.
///
/// # Safety
/// `source` is readable for `len` elements. All but the last call on one chunk have a `len` that is a multiple of
/// LANES. The machine has the instruction set I.
#[inline(always)]
pub(super) unsafe fn examine<I: Isa, S: Scalar, const NORM: bool>(
    source: *const u8,
    len: usize,
    moments: &mut Moments,
) {
    let source = source.cast::<S>();
    let mut running = Running::<S, NORM>::resume(moments);
    let whole = len - len % LANES;
    let mut i = 0;
    while i < whole {
        // SAFETY: `i + LANES <= len`, and the rest is this function's contract.
        let block = unsafe { source.add(i).cast::<[S; LANES]>().read_unaligned() };
        running.see_block(&block, &S::widen_block::<I>(block));
        i += LANES;
    }
    while i < len {
        // SAFETY: `i < len`, and the rest is this function's contract.
        running.see(i % LANES, unsafe { source.add(i).read_unaligned() });
        i += 1;
    }
    running.store(moments);
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
