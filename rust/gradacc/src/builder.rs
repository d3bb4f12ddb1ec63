//! Settings of an accumulator.

use crate::accumulator::GradientAccumulator;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels;
use crate::param::{ParamId, ParamSpec};
use crate::schedule::Schedule;
use crate::store::{FlatStore, Store};
use crate::window::Reduction;

/// What becomes of a micro-batch whose gradients hold NaN or infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNonFinite {
    /// It is added like any other; [`Last::finite`](crate::Last::finite) tells.
    #[default]
    Propagate,
    /// It is refused with [`Error::NonFinite`]. Costs one more read of the gradients.
    Raise,
    /// It is dropped and counted as rejected, and the window waits for one more. Costs one more read of the gradients.
    Skip,
}

/// What becomes of a micro-batch that lacks gradients of some parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnMissing {
    /// They contribute nothing to the sums; the divisor stays the window's.
    #[default]
    Ignore,
    /// It is refused with [`Error::MissingGradient`].
    Error,
}

/// Settings of a new accumulator, and its first parameters.
#[derive(Clone, Debug, Default)]
#[must_use = "call build()"]
pub struct Builder {
    params: Vec<ParamSpec>,
    every: Option<u64>,
    schedule: Schedule,
    dtype: Option<DType>,
    policy: Policy,
}

/// What an accumulator does with what it is given.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Policy {
    pub(crate) reduction: Reduction,
    pub(crate) on_nonfinite: OnNonFinite,
    pub(crate) on_missing: OnMissing,
    pub(crate) micro_norms: bool,
}

impl Builder {
    /// Registers a parameter, which messages call by its id.
    pub fn param(self, id: ParamId, shape: &[usize], dtype: DType) -> Self {
        self.spec(ParamSpec::new(id, shape, dtype))
    }

    /// Registers a parameter.
    pub fn spec(mut self, spec: ParamSpec) -> Self {
        self.params.push(spec);
        self
    }

    /// A window is complete after so many micro-batches. Otherwise the caller decides.
    pub fn every(mut self, micro_batches: u64) -> Self {
        self.every = Some(micro_batches);
        self
    }

    /// What completes a window, if it is not always the same number of micro-batches.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        (self.schedule, self.every) = (schedule, None);
        self
    }

    /// What `take` gives; the mean by default.
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.policy.reduction = reduction;
        self
    }

    /// What all sums are kept in, a real dtype: that of the components of complex ones. By default f64 for f64 parameters and f32 for the others.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// What becomes of non-finite micro-batches; they propagate by default.
    pub fn on_nonfinite(mut self, policy: OnNonFinite) -> Self {
        self.policy.on_nonfinite = policy;
        self
    }

    /// What becomes of micro-batches that lack gradients; they are fine by default.
    pub fn on_missing(mut self, policy: OnMissing) -> Self {
        self.policy.on_missing = policy;
        self
    }

    /// Whether [`Last::norm`](crate::Last::norm) is found, in the pass that adds.
    pub fn micro_norms(mut self, micro_norms: bool) -> Self {
        self.policy.micro_norms = micro_norms;
        self
    }

    /// The accumulator. Reserves nothing yet.
    ///
    /// # Errors
    /// If an id is registered twice, a parameter can't be summed in the dtype asked for, `every` is 0, or an
    /// environment variable of this crate is wrong.
    pub fn build(self) -> Result<GradientAccumulator> {
        self.build_with(FlatStore::new)
    }

    /// The accumulator, with its sums in another store, which is made for the dtype that all sums are to be kept in, if
    /// one was asked for.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_with<S: Store>(self, store: impl FnOnce(Option<DType>) -> S) -> Result<GradientAccumulator<S>> {
        let schedule = self.every.map_or(Ok(self.schedule), Schedule::every)?;
        if let Some(dtype) = self.dtype.filter(|dtype| dtype.is_complex()) {
            let reason = format!("expected a real dtype, for complex numbers that of their components, got {dtype}");
            return Err(Error::argument("dtype", reason));
        }
        kernels::simd_level()?;
        kernels::num_threads()?;
        let mut accumulator = GradientAccumulator::new(schedule, store(self.dtype), self.policy);
        for spec in self.params {
            accumulator.register(spec)?;
        }
        Ok(accumulator)
    }
}
