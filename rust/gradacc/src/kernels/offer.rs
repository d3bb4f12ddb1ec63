//! Work that other threads may help with, and that is not held up by those which come late.
//!
//! A thread that has been asked to help may not get a core for milliseconds: other libraries' threads go on spinning on
//! it for a while after their own work. A scope of rayon's would wait for it even when nothing is left to do.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};

/// That nobody may begin to help any more.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// How often it is looked whether helpers are done, before the thread sleeps.
const SPINS: usize = 2_000;

struct Offer {
    /// Lives on the stack of the thread that offers: nobody may call it after `close` has returned.
    work: *const (dyn Fn() + Sync),
    /// How many are helping, and `CLOSED`.
    helping: AtomicUsize,
    has_panicked: AtomicBool,
    owner: Thread,
}

// SAFETY: `work` is called through a shared reference only, and is Sync; the rest is Send and Sync by itself.
unsafe impl Send for Offer {}
// SAFETY: as above.
unsafe impl Sync for Offer {}

impl Offer {
    /// Calls the work, unless it is too late.
    fn help(&self) {
        if self.helping.fetch_add(1, Ordering::Acquire) & CLOSED == 0 {
            // SAFETY: the offer was open when this thread was counted, so `close`, which the owner calls before the work
            // goes, waits until it is counted no more.
            let work = unsafe { &*self.work };
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                self.has_panicked.store(true, Ordering::Relaxed);
            }
        }
        // The last one wakes the owner, should it sleep.
        if self.helping.fetch_sub(1, Ordering::Release) & !CLOSED == 1 {
            self.owner.unpark();
        }
    }

    /// Lets nobody begin any more, and waits for those who have.
    fn close(&self) {
        self.helping.fetch_or(CLOSED, Ordering::Relaxed);
        let is_done = || self.helping.load(Ordering::Acquire) == CLOSED;
        for _ in 0..SPINS {
            if is_done() {
                return;
            }
            std::hint::spin_loop();
        }
        while !is_done() {
            thread::park();
        }
    }
}

/// Calls `work` on this thread, and on as many others as begin before it returns here. `ask` is given what they are to
/// call, as often as it asks others.
///
/// Panics if any of them does.
pub(super) fn share(work: &(dyn Fn() + Sync), ask: impl FnOnce(&dyn Fn() -> Box<dyn FnOnce() + Send>)) {
    // SAFETY: another lifetime for the same type. It is used no longer than until `close` returns, which is before this
    // function does, by whatever way.
    let work =
        unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(work) };
    let (helping, has_panicked) = (AtomicUsize::new(0), AtomicBool::new(false));
    let offer = Arc::new(Offer { work, helping, has_panicked, owner: thread::current() });
    let own = catch_unwind(AssertUnwindSafe(|| {
        ask(&|| {
            let offer = Arc::clone(&offer);
            Box::new(move || offer.help())
        });
        // SAFETY: it is this function's argument.
        unsafe { (*work)() }
    }));
    offer.close();
    if let Err(panic) = own {
        resume_unwind(panic);
    }
    assert!(!offer.has_panicked.load(Ordering::Relaxed), "a kernel panicked on another thread");
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_helper_that_comes_late_is_not_waited_for_and_does_nothing() {
        let calls = AtomicUsize::new(0);
        let late = Mutex::new(Vec::new());
        let work = || {
            calls.fetch_add(1, Ordering::Relaxed);
        };
        share(&work, |helper| late.lock().unwrap().push(helper()));
        for help in late.into_inner().unwrap() {
            help();
        }
        assert_eq!(calls.into_inner(), 1);
    }

    #[test]
    fn helpers_that_have_begun_are_waited_for() {
        for _ in 0..200 {
            let (begun, wait) = channel();
            let (begun, done) = (Mutex::new(begun), AtomicUsize::new(0));
            let is_owner = thread::current().id();
            let wait = Mutex::new(wait);
            let work = || {
                if thread::current().id() == is_owner {
                    // Returns once both helpers are in their work.
                    let wait = wait.lock().unwrap();
                    wait.recv().and_then(|()| wait.recv()).unwrap();
                } else {
                    begun.lock().unwrap().send(()).unwrap();
                    thread::yield_now();
                    done.fetch_add(1, Ordering::Relaxed);
                }
            };
            share(&work, |helper| {
                for help in [helper(), helper()] {
                    thread::spawn(help);
                }
            });
            assert_eq!(done.into_inner(), 2);
        }
    }

    #[test]
    fn a_panic_of_anybody_is_one_of_all() {
        let is_owner = thread::current().id();
        for of_owner in [true, false] {
            let work = || {
                if of_owner == (thread::current().id() == is_owner) {
                    resume_unwind(Box::new("on purpose"));
                }
            };
            let shared = || share(&work, |helper| thread::spawn(helper()).join().unwrap());
            assert!(catch_unwind(AssertUnwindSafe(shared)).is_err());
        }
    }
}
