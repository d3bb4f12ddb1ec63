//! Tensors that are given by some of their rows: added where they belong, without those in between.

use super::body::{Mode, Moments};
use super::dispatch::Kernels;
use super::parallel::Finding;
use super::{Target, Task, each_run};
use crate::dtype::DType;
use crate::view::Rows;

/// A tensor's rows are shared out in so many parts, however many threads there are: each part looks at all numbers.
const PARTS: usize = 16;

/// Components of a chunk of the tensor: whole rows.
pub(super) fn chunk(len: usize, rows: &Rows<'_>) -> usize {
    let row = rows.len.max(1);
    (len / row).div_ceil(PARTS).max(1) * row
}

/// Adds `scale` times those rows that lie in a chunk, in the order they are given in: so the sums do not depend on how
/// many threads there are.
pub(super) fn add(target: &Target<'_>, rows: &Rows<'_>, chunk: &Task, scale: f64) -> Finding {
    let mut moments = Moments::new(&mut []);
    let mine = chunk.start..chunk.start + chunk.len;
    for (place, number) in rows.numbers.iter().enumerate().filter(|(_, number)| mine.contains(&(*number * rows.len))) {
        each_run(&rows.values, &row(rows, place), |start, data, len| {
            let offset = number * rows.len + (start - place * rows.len);
            let sums = target.start.at(offset * target.element_bytes);
            // SAFETY: `data` holds `len` elements of the values' dtype, by `each_run`. `sums` has room for them: row numbers
            // are below those of the tensor, which has the size of its slot; and this row is of no other chunk. It is
            // aligned as its elements are, and the kernel neither streams nor sums squares. Otherwise as in `add` above.
            unsafe { (target.kernel)(sums, data, len, scale, &mut moments) };
        });
    }
    Finding { finite: moments.finite(), sum_of_squares: 0.0 }
}

/// The sum of squares of the tensor that the rows stand for, in which rows of the same number are one: the sum of them,
/// in f64.
pub(super) fn sum_of_squares(kernels: &Kernels, rows: &Rows<'_>) -> f64 {
    let kernel = kernels.add(rows.values.dtype().component(), DType::F64, Mode::Add, false);
    let kernel = kernel.expect("f64 takes every dtype");
    let mut order: Vec<usize> = (0..rows.numbers.len()).collect();
    order.sort_by_key(|&place| rows.numbers[place]);
    let mut sums = vec![0.0_f64; rows.len];
    let mut total = 0.0;
    for same in order.chunk_by(|&a, &b| rows.numbers[a] == rows.numbers[b]) {
        sums.fill(0.0);
        for &place in same {
            each_run(&rows.values, &row(rows, place), |start, data, len| {
                let sums = sums[start - place * rows.len..][..len].as_mut_ptr();
                // SAFETY: `data` holds `len` elements of the values' dtype, by `each_run`, and `sums` has room for them, by
                // the slices. The kernel is of the level that dispatch found on this machine, and sums no squares.
                unsafe { kernel(sums.cast(), data, len, 1.0, &mut Moments::new(&mut [])) };
            });
        }
        total += sums.iter().map(|sum| sum * sum).sum::<f64>();
    }
    total
}

/// One row as a chunk of the values.
fn row(rows: &Rows<'_>, place: usize) -> Task {
    Task { job: 0, start: place * rows.len, len: rows.len }
}
