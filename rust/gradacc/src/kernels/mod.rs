//! Loops over elements: add, examine, scale. Safe to call; fast because of `dispatch` and `parallel`.
//!
//! A tensor is worked on in chunks of [`CHUNK`] elements, each by one thread and with one sum of squares.

mod body;
mod dispatch;
mod isa;
mod parallel;
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
use crate::view::TensorView;

/// Elements of a chunk: small enough to spread a large tensor over the cores, large enough to be worth the trouble.
const CHUNK: usize = 1 << 16;

/// A micro-batch that reads and writes so many bytes is written past the caches: it would not stay in them anyway.
const STREAM_BYTES: usize = 1 << 26;

/// Bytes that elements of a strided tensor are gathered in, in logical order, before a kernel sees them.
const STAGE_BYTES: usize = 4096;
const _: () = assert!((STAGE_BYTES / 8).is_multiple_of(LANES));

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

fn tasks(lens: impl Iterator<Item = usize>) -> impl Iterator<Item = Task> {
    lens.enumerate().flat_map(|(job, len)| chunks(job, len))
}

fn chunks(job: usize, len: usize) -> impl Iterator<Item = Task> {
    (0..len).step_by(CHUNK).map(move |start| Task { job, start, len: CHUNK.min(len - start) })
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
/// a buffer is not there, or slots of one buffer are not in ascending order without overlap.
pub(crate) fn add<'a>(
    buffers: &mut [Option<Lease>],
    jobs: impl Iterator<Item = Job<'a>>,
    len_bytes: usize,
    scale: f64,
    norm: bool,
) -> Result<Report> {
    let kernels = Kernels::get()?;
    let mut ends = vec![0; buffers.len()];
    let mut last: Option<((DType, DType, Mode), Add)> = None;
    let targets = jobs.map(|Job { source, slot, write }| {
        let buffer: &mut Buffer = buffers[slot.buffer].as_mut().expect("a buffer that is added to is there");
        let end = slot.offset + slot.len;
        assert!(ends[slot.buffer] <= slot.offset && end <= buffer.len(), "slots overlap or leave their buffer");
        assert_eq!(source.len(), slot.len, "a source has the size of its slot");
        ends[slot.buffer] = end;
        let mode = match write {
            true if len_bytes >= STREAM_BYTES => Mode::Stream,
            true => Mode::Write,
            false => Mode::Add,
        };
        let of = (source.dtype(), buffer.dtype(), mode);
        let kernel = match last {
            Some((last, kernel)) if last == of => kernel,
            _ => kernels.add(of.0, of.1, mode, norm).expect("the buffer takes gradients of this dtype"),
        };
        last = Some((of, kernel));
        let element_bytes = buffer.dtype().len_bytes();
        let start = Shared(buffer.as_mut_ptr().wrapping_add(slot.offset * element_bytes));
        Target { source, start, element_bytes, kernel }
    });
    let work = |target: &Target<'_>, task: &Task| {
        let squares = if norm { &mut [0.0; LANES][..] } else { &mut [] };
        let mut moments = Moments::new(squares);
        each_run(target.source, task, |start, data, len| {
            let place = target.start.at(start * target.element_bytes);
            // SAFETY: `data` holds `len` elements of the source's dtype, by `each_run`. `place` has room for them: the
            // slot lies within its buffer and has the source's size, both asserted above; it is exclusively borrowed,
            // and of no other task, since slots of a buffer don't overlap, asserted too, and chunks of a slot don't. It
            // is aligned as slots are. A source can't lie in it: views borrow, and the buffer is exclusively borrowed.
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
            for task in chunks(job, target.source.len()) {
                note(&mut report, &task, work(&target, &task));
            }
        }),
        Some(workers) => {
            let targets: Vec<_> = targets.collect();
            let tasks = tasks(targets.iter().map(|target| target.source.len()));
            workers.run(tasks, |task| work(&targets[task.job], task), |task, finding| note(&mut report, task, finding));
        }
    }
    Ok(report)
}

/// Reads every tensor once and writes nothing.
pub(crate) fn examine(sources: &[&TensorView<'_>], norm: bool) -> Result<Report> {
    let kernels = Kernels::get()?;
    let work = |task: &Task| {
        let source = sources[task.job];
        let kernel = kernels.add(source.dtype(), source.dtype(), Mode::Examine, norm);
        let kernel = kernel.expect("any dtype can be read");
        let squares = if norm { &mut [0.0; LANES][..] } else { &mut [] };
        let mut moments = Moments::new(squares);
        each_run(source, task, |_, data, len| {
            // SAFETY: `data` holds `len` elements of the source's dtype, by `each_run`; the kernel is of the level
            // that dispatch found on this machine. `moments` has lanes if, and only if, the kernel sums squares.
            unsafe { kernel(std::ptr::null_mut(), data, len, 1.0, &mut moments) };
        });
        Finding { finite: moments.finite(), sum_of_squares: moments.sum_of_squares() }
    };
    let mut report = NOTHING_FOUND;
    let len_bytes = sources.iter().map(|source| source.len() * source.dtype().len_bytes()).sum();
    let tasks = tasks(sources.iter().map(|source| source.len()));
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
    parallel::run(len_bytes, tasks(slots.iter().map(|slot| slot.len)), work, |_, _| {});
    Ok(())
}

/// Calls `work` with runs of a chunk's elements, in logical order: where a run starts in the tensor, where its elements
/// lie one after the other, and how many they are; in all but the last run a multiple of LANES.
#[inline(always)]
fn each_run(source: &TensorView<'_>, task: &Task, mut work: impl FnMut(usize, *const u8, usize)) {
    match source.contiguous() {
        Some(data) => work(task.start, data.wrapping_add(task.start * source.dtype().len_bytes()), task.len),
        None => each_gathered_run(source, task, work),
    }
}

/// Apart from the above, which is to have no stage on its stack.
#[inline(never)]
fn each_gathered_run(source: &TensorView<'_>, task: &Task, mut work: impl FnMut(usize, *const u8, usize)) {
    let element_bytes = source.dtype().len_bytes();
    let mut stage = [MaybeUninit::<u64>::uninit(); STAGE_BYTES / 8];
    let stage: *mut u8 = stage.as_mut_ptr().cast();
    let capacity = STAGE_BYTES / element_bytes;
    for done in (0..task.len).step_by(capacity) {
        let (start, len) = (task.start + done, capacity.min(task.len - done));
        // SAFETY: the integer has the size of the dtype, the stage has room for `capacity` of them and is aligned for
        // the largest, and `start + len` is within the chunk, so within the tensor.
        unsafe {
            match element_bytes {
                2 => source.gather(start, std::ptr::slice_from_raw_parts_mut(stage.cast::<u16>(), len)),
                4 => source.gather(start, std::ptr::slice_from_raw_parts_mut(stage.cast::<u32>(), len)),
                _ => source.gather(start, std::ptr::slice_from_raw_parts_mut(stage.cast::<u64>(), len)),
            }
        }
        work(start, stage, len);
    }
}
