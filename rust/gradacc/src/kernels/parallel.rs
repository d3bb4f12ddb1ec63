//! The threads that kernels run on.
//!
//! How work is cut into tasks never depends on the number of threads, and results are put together in the order of
//! the tasks, so the number of threads changes no bit of any result.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::offer;
use crate::error::{Error, Result};

/// Work on fewer bytes than this stays on the calling thread. Measured: two threads are as quick as one at 1 to 2 MiB,
/// and three times as quick at 4; waking the other takes tens of microseconds.
const PARALLEL_BYTES: usize = 1 << 21;

/// How many portions each thread's share is cut into, so that a thread that is held up does not hold up the others.
const PORTIONS: usize = 8;

/// What `set_num_threads` has set; 0 before.
static NUM_THREADS: AtomicUsize = AtomicUsize::new(0);

/// How many threads kernels use, the calling one included.
///
/// By default the cores this process may use (affinity and cgroup quota counted), or what the environment variable
/// `GRADACC_NUM_THREADS` says.
///
/// # Errors
/// [`Error::Argument`] if `GRADACC_NUM_THREADS` is no whole number of at least 1.
pub fn num_threads() -> Result<usize> {
    static DEFAULT: OnceLock<Result<usize>> = OnceLock::new();
    match NUM_THREADS.load(Ordering::Relaxed) {
        0 => DEFAULT.get_or_init(|| default_threads(std::env::var_os("GRADACC_NUM_THREADS"))).clone(),
        threads => Ok(threads),
    }
}

/// Sets how many threads kernels use, the calling one included, in this process from now on. Changes no result.
///
/// # Errors
/// [`Error::Argument`] if `threads` is 0.
pub fn set_num_threads(threads: usize) -> Result<()> {
    if threads == 0 {
        return Err(Error::argument("num_threads", "expected at least 1, got 0"));
    }
    NUM_THREADS.store(threads, Ordering::Relaxed);
    Ok(())
}

fn default_threads(variable: Option<std::ffi::OsString>) -> Result<usize> {
    match variable.filter(|value| !value.is_empty()) {
        None => Ok(std::thread::available_parallelism().map_or(1, Into::into)),
        Some(value) => {
            value.to_str().and_then(|value| value.trim().parse().ok()).filter(|&threads| threads >= 1).ok_or_else(
                || {
                    let reason = format!("expected a whole number of at least 1, got {value:?}");
                    Error::argument("GRADACC_NUM_THREADS", reason)
                },
            )
        }
    }
}

/// What one task has found out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Finding {
    pub(super) sum_of_squares: f64,
    pub(super) finite: bool,
}

/// Runs `work` on every task and hands what it found to `each`, in the order of the tasks, on the calling thread.
/// `len_bytes` is what all tasks together read and write.
pub(super) fn run<T: Sync>(
    len_bytes: usize,
    tasks: impl Iterator<Item = T>,
    work: impl Fn(&T) -> Finding + Sync,
    mut each: impl FnMut(&T, Finding),
) {
    match Workers::for_work(len_bytes) {
        None => tasks.for_each(|task| each(&task, work(&task))),
        Some(workers) => workers.run(tasks, work, each),
    }
}

/// Threads that wait for work. Never freed: a process has few of them, and after a fork the child must not touch
/// those of its parent, not even to drop them.
pub(super) struct Workers {
    pool: ThreadPool,
    count: usize,
    process: u32,
}

static WORKERS: AtomicPtr<Workers> = AtomicPtr::new(ptr::null_mut());

impl Workers {
    /// Those to share work on so many bytes with; None if it is the calling thread's alone.
    pub(super) fn for_work(len_bytes: usize) -> Option<&'static Self> {
        if len_bytes < PARALLEL_BYTES {
            return None;
        }
        // A wrong GRADACC_NUM_THREADS has been reported by the time anything runs.
        match num_threads() {
            Ok(threads) if threads > 1 => Self::get(threads - 1),
            _ => None,
        }
    }

    /// See the function [`run`].
    pub(super) fn run<T: Sync>(
        &self,
        tasks: impl Iterator<Item = T>,
        work: impl Fn(&T) -> Finding + Sync,
        mut each: impl FnMut(&T, Finding),
    ) {
        let tasks: Vec<T> = tasks.collect();
        let found: Vec<(AtomicU64, AtomicBool)> = tasks.iter().map(|_| Default::default()).collect();
        let threads = num_threads().unwrap_or(1).min(self.count + 1);
        let portion = tasks.len().div_ceil(threads * PORTIONS).max(1);
        let next = AtomicUsize::new(0);
        let share = || {
            loop {
                let start = next.fetch_add(portion, Ordering::Relaxed);
                if start >= tasks.len() {
                    break;
                }
                for i in start..(start + portion).min(tasks.len()) {
                    let Finding { sum_of_squares, finite } = work(&tasks[i]);
                    found[i].0.store(sum_of_squares.to_bits(), Ordering::Relaxed);
                    found[i].1.store(finite, Ordering::Relaxed);
                }
            }
        };
        offer::share(&share, |helper| (1..threads).for_each(|_| self.pool.spawn(helper())));
        for (task, (squares, finite)) in tasks.iter().zip(&found) {
            let sum_of_squares = f64::from_bits(squares.load(Ordering::Relaxed));
            each(task, Finding { sum_of_squares, finite: finite.load(Ordering::Relaxed) });
        }
    }

    /// At least `count` threads of this process; None if the system gives none. Takes no lock, so that a fork at any
    /// moment leaves nothing locked in the child.
    fn get(count: usize) -> Option<&'static Self> {
        loop {
            let current = WORKERS.load(Ordering::Acquire);
            // SAFETY: the pointer is null or was leaked from a Box below, and is never freed.
            let known = unsafe { current.as_ref() };
            let process = std::process::id();
            if let Some(workers) = known.filter(|workers| workers.process == process && workers.count >= count) {
                return Some(workers);
            }
            let pool =
                ThreadPoolBuilder::new().num_threads(count).thread_name(|i| format!("gradacc-{i}")).build().ok()?;
            let created = Box::into_raw(Box::new(Self { pool, count, process }));
            if WORKERS.compare_exchange(current, created, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                // SAFETY: just leaked, never freed.
                return Some(unsafe { &*created });
            }
            // SAFETY: from `Box::into_raw` above, and nobody else has seen it.
            drop(unsafe { Box::from_raw(created) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_variable_is_a_whole_number_of_at_least_1() {
        assert_eq!(default_threads(Some(" 3 ".into())), Ok(3));
        assert!(default_threads(None).unwrap() >= 1);
        for wrong in ["0", "-1", "2.5", "many"] {
            let message = default_threads(Some(wrong.into())).unwrap_err().to_string();
            assert!(message.contains("GRADACC_NUM_THREADS") && message.contains(wrong), "{message}");
        }
    }

    #[test]
    fn findings_come_in_the_order_of_the_tasks() {
        for len_bytes in [0, PARALLEL_BYTES] {
            for count in [0, 1, 2, 1000] {
                let mut seen = Vec::new();
                let work = |&i: &usize| Finding { sum_of_squares: i as f64, finite: i % 3 != 0 };
                run(len_bytes, 0..count, work, |&i, finding| seen.push((i, finding)));
                assert_eq!(seen, (0..count).map(|i| (i, work(&i))).collect::<Vec<_>>());
            }
        }
    }
}
