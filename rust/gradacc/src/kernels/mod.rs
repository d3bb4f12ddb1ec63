//! Loops over elements: add, examine, scale. Safe to call; fast because of `dispatch` and `parallel`.
//!
//! A tensor is worked on in chunks of about [`CHUNK`] elements, each by one thread and with one sum of squares. Complex
//! numbers are pairs here: whatever is said of elements goes for components.

mod body;
mod dispatch;
mod isa;
mod offer;
mod parallel;
mod rows;
mod scalar;
#[cfg(test)]
mod tests;

pub use dispatch::{SimdLevel, simd_level};
pub use parallel::{num_threads, set_num_threads};

use std::mem::MaybeUninit;

use body::{Mode, Moments};
use dispatch::{Add, Kernels};
use parallel::{Finding, Workers};
use scalar::LANES;

use crate::buffer::{Buffer, Lease};
use crate::dtype::DType;
use crate::error::Result;
use crate::param::Slot;
use crate::store::Report;
use crate::view::{TensorView, Tile, Tiling};

/// Elements of a chunk: small enough to spread a large tensor over the cores, large enough to be worth the trouble.
const CHUNK: usize = 1 << 16;

/// A micro-batch that reads and writes so many bytes is written past the caches: it would not stay in them anyway.
const STREAM_BYTES: usize = 1 << 26;

/// Bytes that elements of a strided tensor are gathered in, in logical order, before a kernel sees them.
const STAGE_BYTES: usize = 4096;
const _: () = assert!((STAGE_BYTES / 8).is_multiple_of(LANES));

/// Rows of a tile of a tensor that lies the other way round: so many neighbours in memory are read at once, a cache line
/// or more. Measured: with 32 a transposed matrix takes a sixth longer.
const TILE_ROWS: usize = 64;
/// Bytes that a tile is gathered in.
const TILE_BYTES: usize = 1 << 15;

fn note(report: &mut Report, task: &Task, finding: Finding) {
    if !finding.finite && report.first_nonfinite.is_none() {
        report.first_nonfinite = Some(task.job);
    }
    report.sum_of_squares += finding.sum_of_squares;
}

const NOTHING_FOUND: Report = Report { first_nonfinite: None, sum_of_squares: 0.0 };

/// One gradient to be added.
pub(crate) struct Job<'a> {
    pub(crate) source: &'a TensorView<'a>,
    pub(crate) slot: Slot,
    /// Whether the slot is written, rather than added to.
    pub(crate) write: bool,
}

/// A chunk of the tensor of one job.
struct Task {
    job: usize,
    start: usize,
    len: usize,
}

fn chunks(job: usize, len: usize, chunk: usize) -> impl Iterator<Item = Task> {
    (0..len).step_by(chunk).map(move |start| Task { job, start, len: chunk.min(len - start) })
}

fn chunks_of(job: usize, source: &TensorView<'_>) -> impl Iterator<Item = Task> {
    let chunk = match (source.tiling(), source.rows()) {
        (Some(Tiling { columns, .. }), _) => columns * (CHUNK / columns).next_multiple_of(TILE_ROWS).max(TILE_ROWS),
        (_, Some(rows)) => rows::chunk(source.component_count(), rows),
        _ => CHUNK,
    };
    chunks(job, source.component_count(), chunk)
}

/// The start of memory that threads share: each task has a part of its own.
struct Shared(*mut u8);

impl Shared {
    fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

// SAFETY: established by the functions below: tasks write disjoint parts of memory that is exclusively borrowed
// meanwhile, so that no two threads meet.
unsafe impl Sync for Shared {}

/// What one gradient is added to, and how.
struct Target<'a> {
    source: &'a TensorView<'a>,
    start: Shared,
    element_bytes: usize,
    kernel: Add,
}

/// Writes or adds `scale` times every source to its slot. `len_bytes` is what that reads and writes, roughly.
///
/// Panics, before its slot is written, if a source does not fit its slot, its dtype is not one that the buffer takes,
/// a buffer is not there, slots of one buffer are not in ascending order without overlap, or a source that is given by
/// rows is to be written.
pub(crate) fn add<'a>(
    buffers: &mut [Option<Lease>],
    jobs: impl Iterator<Item = Job<'a>>,
    len_bytes: usize,
    scale: f64,
    norm: bool,
) -> Result<Report> {
    let kernels = Kernels::get()?;
    let mut ends = vec![0; buffers.len()];
    let mut last: Option<((DType, DType, Mode, bool), Add)> = None;
    let targets = jobs.map(|Job { source, slot, write }| {
        let buffer: &mut Buffer = buffers[slot.buffer].as_mut().expect("a buffer that is added to is there");
        let end = slot.offset + slot.len;
        assert!(ends[slot.buffer] <= slot.offset && end <= buffer.len(), "slots overlap or leave their buffer");
        assert_eq!(source.component_count(), slot.len, "a source has the size of its slot");
        assert!(!write || source.rows().is_none(), "rows are added to what is there");
        ends[slot.buffer] = end;
        let mode = match write {
            true if len_bytes >= STREAM_BYTES && source.tiling().is_none() => Mode::Stream,
            true => Mode::Write,
            false => Mode::Add,
        };
        let of = (source.dtype().component(), buffer.dtype(), mode, norm && source.rows().is_none());
        let kernel = match last {
            Some((last, kernel)) if last == of => kernel,
            _ => kernels.add(of.0, of.1, mode, of.3).expect("the buffer takes gradients of this dtype"),
        };
        last = Some((of, kernel));
        let element_bytes = buffer.dtype().len_bytes();
        let start = Shared(buffer.as_mut_ptr().wrapping_add(slot.offset * element_bytes));
        Target { source, start, element_bytes, kernel }
    });
    let work = |target: &Target<'_>, task: &Task| {
        if let Some(rows) = target.source.rows() {
            let mut finding = rows::add(target, rows, task, scale);
            if norm && task.start == 0 {
                finding.sum_of_squares = rows::sum_of_squares(kernels, rows);
            }
            return finding;
        }
        let squares = if norm { &mut [0.0; LANES][..] } else { &mut [] };
        let mut moments = Moments::new(squares);
        each_run(target.source, task, |start, data, len| {
            let place = target.start.at(start * target.element_bytes);
            // SAFETY: `data` holds `len` elements of the source's dtype, by `each_run`. `place` has room for them: the
            // slot lies within its buffer and has the source's size, both asserted above; it is exclusively borrowed,
            // and of no other task, since slots of a buffer don't overlap, asserted too, and chunks of a slot don't. It
            // is aligned as slots are, or, of a tile, as its elements are: those are never streamed. A source can't lie in it: views borrow, and the buffer is exclusively borrowed.
            // The kernel is of the level that dispatch found on this machine. `moments` has lanes if, and only if, the
            // kernel sums squares.
            unsafe { (target.kernel)(place, data, len, scale, &mut moments) };
        });
        Finding { finite: moments.finite(), sum_of_squares: moments.sum_of_squares() }
    };
    let mut report = NOTHING_FOUND;
    match Workers::for_work(len_bytes) {
        // Many small tensors: nothing is set aside.
        None => targets.enumerate().for_each(|(job, target)| {
            for task in chunks_of(job, target.source) {
                note(&mut report, &task, work(&target, &task));
            }
        }),
        Some(workers) => {
            let targets: Vec<_> = targets.collect();
            let tasks = targets.iter().enumerate().flat_map(|(job, target)| chunks_of(job, target.source));
            workers.run(tasks, |task| work(&targets[task.job], task), |task, finding| note(&mut report, task, finding));
        }
    }
    Ok(report)
}

/// Reads every tensor once and writes nothing.
pub(crate) fn examine(sources: &[&TensorView<'_>], norm: bool) -> Result<Report> {
    let kernels = Kernels::get()?;
    let squared = |source: &TensorView<'_>| norm && source.rows().is_none();
    let work = |task: &Task| {
        let source = sources[task.job];
        let values = source.rows().map_or(source, |rows| &rows.values);
        let dtype = source.dtype().component();
        let kernel = kernels.add(dtype, dtype, Mode::Examine, squared(source));
        let kernel = kernel.expect("any dtype can be read");
        let squares = if squared(source) { &mut [0.0; LANES][..] } else { &mut [] };
        let mut moments = Moments::new(squares);
        each_run(values, task, |_, data, len| {
            // SAFETY: `data` holds `len` elements of the source's dtype, by `each_run`; the kernel is of the level
            // that dispatch found on this machine. `moments` has lanes if, and only if, the kernel sums squares.
            unsafe { kernel(std::ptr::null_mut(), data, len, 1.0, &mut moments) };
        });
        let finite = moments.finite();
        let sum_of_squares = match source.rows() {
            Some(rows) if norm && task.start == 0 => rows::sum_of_squares(kernels, rows),
            _ => moments.sum_of_squares(),
        };
        Finding { finite, sum_of_squares }
    };
    let mut report = NOTHING_FOUND;
    let len_bytes = sources.iter().map(|source| source.stored_count() * element_bytes(source)).sum();
    let values = sources.iter().map(|source| source.rows().map_or(*source, |rows| &rows.values));
    let tasks = values.enumerate().flat_map(|(job, values)| chunks_of(job, values));
    parallel::run(len_bytes, tasks, work, |task, finding| note(&mut report, task, finding));
    Ok(report)
}

/// What sums are multiplied with or divided by on their way out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Factor {
    Times(f64),
    DividedBy(f64),
}

/// Applies a factor to slots of a buffer, in place or, given another `source` of the same kind, into this one.
///
/// Panics, before anything is written, if a slot leaves its buffer, or slots are not in ascending order without
/// overlap.
pub(crate) fn scale(target: &mut Buffer, source: Option<&Buffer>, slots: &[Slot], factor: Factor) -> Result<()> {
    let kernels = Kernels::get()?;
    let (divide, factor) = match factor {
        Factor::Times(factor) => (false, factor),
        Factor::DividedBy(divisor) => (true, divisor),
    };
    let mut end = 0;
    for slot in slots {
        assert!(end <= slot.offset && slot.offset + slot.len <= target.len(), "slots overlap or leave their buffer");
        end = slot.offset + slot.len;
    }
    let element_bytes = target.dtype().len_bytes();
    if let Some(source) = source {
        assert!(source.len() == target.len() && source.dtype() == target.dtype(), "buffers of different kinds");
    }
    let kernel = (kernels.scale)(target.dtype(), divide);
    let start = Shared(target.as_mut_ptr());
    // Only read, through a pointer that happens to be able to write.
    let from = Shared(source.map_or(start.0, |source| source.as_ptr().cast_mut()));
    let work = |task: &Task| {
        let offset = (slots[task.job].offset + task.start) * element_bytes;
        let (place, data) = (start.at(offset), from.at(offset));
        // SAFETY: the slot lies within the target, and the source has the same size, both asserted above. The target is
        // exclusively borrowed, and the source, where it is another, shared. Tasks don't overlap, since slots don't.
        // Both are aligned as slots are. The kernel is of the level that dispatch found on this machine.
        unsafe { kernel(place, data, task.len, factor) };
        Finding { sum_of_squares: 0.0, finite: true }
    };
    let len_bytes = slots.iter().map(|slot| 2 * slot.len * element_bytes).sum();
    let tasks = slots.iter().enumerate().flat_map(|(job, slot)| chunks(job, slot.len, CHUNK));
    parallel::run(len_bytes, tasks, work, |_, _| {});
    Ok(())
}

/// Calls `work` with runs of a chunk's elements: where a run starts in the tensor, where its elements lie one after the
/// other, and how many they are. Runs are in logical order, and in all but the last their number is a multiple of LANES,
/// unless the tensor lies the other way round.
#[inline(always)]
fn each_run(source: &TensorView<'_>, task: &Task, mut work: impl FnMut(usize, *const u8, usize)) {
    match source.contiguous() {
        Some(data) => work(task.start, data.wrapping_add(task.start * element_bytes(source)), task.len),
        None => each_gathered_run(source, task, work),
    }
}

fn element_bytes(source: &TensorView<'_>) -> usize {
    source.dtype().component().len_bytes()
}

/// Apart from the above, which is to have no stage on its stack.
#[inline(never)]
fn each_gathered_run(source: &TensorView<'_>, task: &Task, work: impl FnMut(usize, *const u8, usize)) {
    match (source.tiling(), element_bytes(source)) {
        (None, 2) => each_stretch::<u16>(source, task, work),
        (None, 4) => each_stretch::<u32>(source, task, work),
        (None, _) => each_stretch::<u64>(source, task, work),
        (Some(tiling), 2) => each_tile::<u16>(source, tiling, task, work),
        (Some(tiling), 4) => each_tile::<u32>(source, tiling, task, work),
        (Some(tiling), _) => each_tile::<u64>(source, tiling, task, work),
    }
}

/// `S` is an integer of the size of an element.
fn each_stretch<S: Copy>(source: &TensorView<'_>, task: &Task, mut work: impl FnMut(usize, *const u8, usize)) {
    let mut stage = Stage([MaybeUninit::<u64>::uninit(); STAGE_BYTES / 8]);
    let stage: *mut S = stage.0.as_mut_ptr().cast();
    let capacity = STAGE_BYTES / size_of::<S>();
    for done in (0..task.len).step_by(capacity) {
        let (start, len) = (task.start + done, capacity.min(task.len - done));
        // SAFETY: the stage has room for `capacity` integers and is aligned for them, and `start + len` is within the
        // chunk, so within the tensor.
        unsafe { source.gather(start, std::ptr::slice_from_raw_parts_mut(stage, len)) };
        work(start, stage.cast(), len);
    }
}

/// `S` is an integer of the size of an element; the chunk is some whole rows.
fn each_tile<S: Copy>(
    source: &TensorView<'_>,
    tiling: Tiling,
    task: &Task,
    mut work: impl FnMut(usize, *const u8, usize),
) {
    let mut stage = Stage([MaybeUninit::<u64>::uninit(); TILE_BYTES / 8]);
    let stage: *mut S = stage.0.as_mut_ptr().cast();
    let widest = TILE_BYTES / size_of::<S>() / TILE_ROWS;
    let (mut row, end) = (task.start / tiling.columns, (task.start + task.len) / tiling.columns);
    while row < end {
        // Of one matrix.
        let rows = TILE_ROWS.min(tiling.rows - row % tiling.rows).min(end - row);
        for column in (0..tiling.columns).step_by(widest) {
            let columns = widest.min(tiling.columns - column);
            // SAFETY: the stage has room for TILE_ROWS rows of `widest` integers and is aligned for them; the tile lies
            // within the chunk, so within the tensor, and its rows within one matrix.
            unsafe { source.gather_tile(&Tile { row, rows, column, columns }, stage, columns) };
            if columns == tiling.columns {
                work(row * columns, stage.cast(), rows * columns);
            } else {
                for i in 0..rows {
                    work((row + i) * tiling.columns + column, stage.wrapping_add(i * columns).cast(), columns);
                }
            }
        }
        row += rows;
    }
}

/// Aligned as cache lines are.
#[repr(align(64))]
struct Stage<const N: usize>([MaybeUninit<u64>; N]);
