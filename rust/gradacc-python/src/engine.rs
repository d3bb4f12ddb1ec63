//! The engine's accumulator as threads of Python share it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, TryLockError};

use gradacc::{Error, GradientAccumulator};
use pyo3::PyErr;
use pyo3::prelude::*;

use crate::errors;
use crate::store::DeviceStore;

pub(crate) type Engine = GradientAccumulator<DeviceStore>;

/// Adds of fewer bytes than this keep the GIL. Measured: releasing it and getting it back takes 80 ns, such an add no
/// more than 2.5 µs.
const KEEPS_THE_GIL: usize = 1 << 16;

/// The accumulator behind its one lock, which is waited for only without the GIL.
///
/// While it is held, the only Python code that runs is that of torch's store. Should that in turn lead to a call of this
/// accumulator (a finalizer may run at any time), the call is refused: it would wait for itself.
pub(crate) struct Shared {
    engine: Mutex<Engine>,
    /// The thread that holds the lock, and its process; 0 if none does.
    thread: AtomicUsize,
    process: AtomicU64,
}

/// Of whoever holds the lock; forgets it when dropped.
struct Holder<'a>(&'a Shared);

impl Drop for Holder<'_> {
    fn drop(&mut self) {
        self.0.thread.store(0, Ordering::Relaxed);
    }
}

impl Shared {
    pub(crate) fn new(engine: Engine) -> Self {
        Self { engine: Mutex::new(engine), thread: AtomicUsize::new(0), process: AtomicU64::new(0) }
    }

    /// Runs the engine and translates its errors.
    pub(crate) fn run<R: Send>(
        &self,
        py: Python<'_>,
        len_bytes: usize,
        work: impl FnOnce(&mut Engine) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        self.enter(py, len_bytes, work).map_err(|error| self.raise(py, error))
    }

    /// Runs the engine: with the GIL for as little as `len_bytes` of gradients are, if nobody has to be waited for, and
    /// without it otherwise.
    pub(crate) fn enter<R: Send>(
        &self,
        py: Python<'_>,
        len_bytes: usize,
        work: impl FnOnce(&mut Engine) -> Result<R, Error> + Send,
    ) -> Result<R, Error> {
        let hold = |engine: &mut Engine| {
            self.thread.store(this_thread(), Ordering::Relaxed);
            self.process.store(std::process::id().into(), Ordering::Relaxed);
            let _holder = Holder(self);
            work(engine)
        };
        if len_bytes < KEEPS_THE_GIL
            && let Ok(mut engine) = self.engine.try_lock()
        {
            return hold(&mut engine);
        }
        py.detach(|| match self.engine.try_lock() {
            Ok(mut engine) => hold(&mut engine),
            // After a panic, a bug of the engine, the window is what it was left as.
            Err(TryLockError::Poisoned(engine)) => hold(&mut engine.into_inner()),
            Err(TryLockError::WouldBlock) => {
                self.check_waiting()?;
                hold(&mut self.engine.lock().unwrap_or_else(PoisonError::into_inner))
            }
        })
    }

    /// Refuses to wait for somebody who will never let go.
    fn check_waiting(&self) -> Result<(), Error> {
        let thread = self.thread.load(Ordering::Relaxed);
        let refuse = |reason: &str| Err(Error::Store { reason: reason.into(), is_added: false });
        if thread == this_thread() {
            return refuse("this accumulator is in use by the call that led to this one");
        }
        if thread != 0 && self.process.load(Ordering::Relaxed) != u64::from(std::process::id()) {
            return refuse(
                "this process was forked while another thread was using the accumulator: make a new one here",
            );
        }
        Ok(())
    }

    /// The exception that an error becomes: torch's own, if that is where it comes from.
    pub(crate) fn raise(&self, py: Python<'_>, error: Error) -> PyErr {
        let own = match &error {
            Error::Store { .. } => self.engine.try_lock().ok().and_then(|engine| engine.store().take_failure()),
            _ => None,
        };
        own.unwrap_or_else(|| errors::raise(py, error))
    }
}

/// A number of this thread, not 0.
fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| std::ptr::from_ref(place).addr())
}
