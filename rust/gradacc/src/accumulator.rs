//! The accumulator: one window and the store its sums are kept in.

use std::num::NonZeroU64;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::gradients::HasGradients;
use crate::kernels;
use crate::param::{ParamId, ParamSpec};
use crate::store::{Closing, FlatStore, Store};
use crate::window::{Reduction, Seen, Weight, Window};

/// What becomes of a micro-batch whose gradients hold NaN or infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNonFinite {
    /// It is added like any other; [`Last::finite`] tells.
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

/// What is known of the last micro-batch that was not refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Last {
    /// Whether its gradients were free of NaN and infinity. True if they were not read, at scale 0.
    pub finite: bool,
    /// The Euclidean norm of all its gradients as they were given, before any scale, if `micro_norms` asked for it and
    /// they were read.
    pub norm: Option<f64>,
}

/// What became of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Added {
    complete: bool,
    skipped: bool,
}

impl Added {
    /// Whether the window now has all its micro-batches. Never, if the caller decides how many it has.
    pub fn is_complete(self) -> bool {
        self.complete
    }

    /// Whether the micro-batch was dropped for being non-finite.
    pub fn is_skipped(self) -> bool {
        self.skipped
    }
}

/// Settings of a new accumulator, and its first parameters.
#[derive(Clone, Debug, Default)]
#[must_use = "call build()"]
pub struct Builder {
    params: Vec<ParamSpec>,
    every: Option<u64>,
    dtype: Option<DType>,
    policy: Policy,
}

#[derive(Clone, Copy, Debug, Default)]
struct Policy {
    reduction: Reduction,
    on_nonfinite: OnNonFinite,
    on_missing: OnMissing,
    micro_norms: bool,
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

    /// What `take` gives; the mean by default.
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.policy.reduction = reduction;
        self
    }

    /// What all sums are kept in. By default f64 for f64 parameters and f32 for the others.
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

    /// Whether [`Last::norm`] is found, in the pass that adds.
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
        let every = self.every.map(|every| {
            NonZeroU64::new(every)
                .ok_or_else(|| Error::argument("every", "expected a whole number of at least 1, got 0"))
        });
        kernels::simd_level()?;
        kernels::num_threads()?;
        let mut accumulator = GradientAccumulator {
            window: Window::first(every.transpose()?),
            store: FlatStore::new(self.dtype),
            policy: self.policy,
            last: None,
        };
        for spec in self.params {
            accumulator.register(spec)?;
        }
        Ok(accumulator)
    }
}

/// Adds the gradients of micro-batches up, in place, and hands over their weighted mean.
///
/// Owns the buffers it adds into; gradients are only read. Window and sums change together or, when a call is refused,
/// not at all.
///
/// ```
/// use gradacc::{DType, GradientAccumulator, ParamId, TensorView, Weight};
///
/// let id = ParamId(0);
/// let mut accumulator = GradientAccumulator::builder().param(id, &[2], DType::F32).every(2).build()?;
/// for (gradient, tokens) in [([5.0_f32, 1.0], 2.0), ([0.25, 1.0], 8.0)] {
///     let micro_batch = [(id, TensorView::from_slice(&gradient, &[2])?)];
///     accumulator.add(&micro_batch[..], Weight::new(tokens)?)?;
/// }
/// let gradients = accumulator.take()?;
/// assert_eq!(gradients.get(id)?.unwrap().as_slice::<f32>()?, [1.2, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct GradientAccumulator<S: Store = FlatStore> {
    window: Window,
    store: S,
    policy: Policy,
    last: Option<Last>,
}

impl GradientAccumulator {
    /// Settings and parameters of a new accumulator.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Adds the gradients of one micro-batch. They are read, and neither kept nor changed.
    ///
    /// # Errors
    /// Unknown or repeated ids, shapes or dtypes that do not fit, a complete window, and what the policies refuse. Then
    /// nothing has been written and nothing counted.
    pub fn add<G: HasGradients + ?Sized>(&mut self, gradients: &G, weight: Weight) -> Result<Added> {
        let mut batch = Vec::new();
        let mut unknown = None;
        gradients.for_each_gradient(&mut |id, view| match self.store.layout().index_of(id) {
            Some(param) => batch.push((param, view)),
            None => unknown = unknown.or(Some(id)),
        })?;
        match unknown {
            Some(id) => Err(Error::UnknownParameter { parameter: id.to_string() }),
            None => self.add_batch(&mut batch, weight),
        }
    }
}

impl<S: Store> GradientAccumulator<S> {
    /// Adds one micro-batch whose gradients go by their parameters' numbers in the layout. They are sorted by them.
    ///
    /// # Errors
    /// As for [`add`](GradientAccumulator::add). Panics if there is no parameter of a number.
    pub fn add_batch(&mut self, batch: &mut [(usize, S::Tensor<'_>)], weight: Weight) -> Result<Added> {
        self.window.admit(weight)?;
        self.check(batch)?;
        let (scale, policy) = (weight.scale(), self.policy);
        let last = if scale == 0.0 {
            Last { finite: true, norm: None }
        } else {
            let seen = self.window.seen();
            let report = if policy.on_nonfinite == OnNonFinite::Propagate {
                self.store.add(batch, scale, seen, policy.micro_norms)?
            } else {
                let report = self.store.examine(batch, policy.micro_norms)?;
                match report.first_nonfinite {
                    Some(place) if policy.on_nonfinite == OnNonFinite::Raise => {
                        return Err(Error::NonFinite { parameter: self.name(batch[place].0) });
                    }
                    Some(_) => {
                        self.last = Some(Last::new(report.first_nonfinite, report.sum_of_squares, policy));
                        self.window.reject();
                        return Ok(Added { complete: false, skipped: true });
                    }
                    None => self.store.add(batch, scale, seen, false)?,
                };
                report
            };
            Last::new(report.first_nonfinite, report.sum_of_squares, policy)
        };
        self.window.count(weight, batch.iter().map(|&(param, _)| param));
        self.last = Some(last);
        Ok(Added { complete: self.window.is_complete(), skipped: false })
    }

    /// Sorts a batch, and refuses it for everything that can be told without reading its elements.
    fn check(&self, batch: &mut [(usize, S::Tensor<'_>)]) -> Result<()> {
        let (mut is_ascending, mut least) = (true, 0);
        for (param, gradient) in &*batch {
            is_ascending &= least <= *param;
            least = *param + 1;
            self.store.check(*param, gradient)?;
        }
        if !is_ascending {
            batch.sort_by_key(|&(param, _)| param);
            if let Some(twice) = batch.windows(2).find(|pair| pair[0].0 == pair[1].0) {
                return Err(Error::DuplicateParameter { parameter: self.name(twice[0].0) });
            }
        }
        if self.policy.on_missing == OnMissing::Error && batch.len() < self.store.layout().len() {
            let missing =
                (0..).zip(&*batch).find(|(param, entry)| *param != entry.0).map_or(batch.len(), |(param, _)| param);
            return Err(Error::MissingGradient { parameter: self.name(missing) });
        }
        Ok(())
    }

    fn name(&self, param: usize) -> String {
        self.store.layout().spec(param).name.clone()
    }

    /// Closes the window and hands its gradients over; the next one opens. Costs the same whatever the size, unless all
    /// that was added for a parameter was masked.
    ///
    /// # Errors
    /// [`Error::Window`] if the window is empty, or a mean is asked for and its weight is 0 though something was added.
    /// The window is kept then.
    pub fn take(&mut self) -> Result<S::Taken> {
        let divisor = self.window.divisor(self.policy.reduction)?;
        let numbered = self.window.seen().iter().enumerate();
        let closing = Closing {
            seen: numbered
                .filter(|&(_, &seen)| seen != Seen::Never)
                .map(|(i, &seen)| (i, seen == Seen::Written))
                .collect(),
            divisor,
            count: self.window.len(),
            weight: self.window.weight(),
            rejected: self.window.rejected(),
        };
        let taken = self.store.take(closing)?;
        self.window.advance();
        Ok(taken)
    }

    /// Forgets what the window holds. It stays the same window, and is empty.
    pub fn reset(&mut self) {
        self.window.reset();
        self.store.reset();
    }

    /// Registers a parameter, also within a window. Nothing moves. Returns its number in the layout.
    ///
    /// # Errors
    /// If its id is registered already, or it can't be summed in the dtype asked for.
    pub fn register(&mut self, spec: ParamSpec) -> Result<usize> {
        let param = self.store.register(spec)?;
        self.window.register();
        Ok(param)
    }

    /// The parameters and where their sums lie.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Micro-batches added to this window.
    pub fn count(&self) -> u64 {
        self.window.len()
    }

    /// The weight of this window so far.
    pub fn weight(&self) -> f64 {
        self.window.weight()
    }

    /// Micro-batches of this window that were skipped for being non-finite.
    pub fn rejected(&self) -> u64 {
        self.window.rejected()
    }

    /// Whether the window has all its micro-batches.
    pub fn is_complete(&self) -> bool {
        self.window.is_complete()
    }

    /// How many windows were taken before this one.
    pub fn window(&self) -> u64 {
        self.window.index()
    }

    /// How many micro-batches this window is to have; None if the caller decides.
    pub fn every(&self) -> Option<u64> {
        self.window.every().map(NonZeroU64::get)
    }

    /// What is known of the last micro-batch, of whichever window.
    pub fn last(&self) -> Option<Last> {
        self.last
    }
}

impl Last {
    fn new(first_nonfinite: Option<usize>, sum_of_squares: f64, policy: Policy) -> Self {
        Self { finite: first_nonfinite.is_none(), norm: policy.micro_norms.then(|| sum_of_squares.sqrt()) }
    }
}
