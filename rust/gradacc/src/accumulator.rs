//! The accumulator: one window and the store its sums are kept in.

use crate::builder::{Builder, OnMissing, OnNonFinite, Policy};
use crate::error::{Error, Result, TensorError, WindowError};
use crate::gradients::HasGradients;
use crate::micro_batch::Parts;
use crate::param::ParamSpec;
use crate::schedule::{Goal, Schedule, at_least_1};
use crate::store::{FlatStore, Report, Store};
use crate::view::TensorView;
use crate::window::{Share, Weight, Window};

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
    pub(crate) complete: bool,
    pub(crate) skipped: bool,
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
    pub(crate) window: Window,
    pub(crate) store: S,
    pub(crate) policy: Policy,
    pub(crate) last: Option<Last>,
    /// The micro-batch that is coming in parts, if one is.
    pub(crate) parts: Option<Parts>,
    /// How many micro-batches were begun in parts.
    pub(crate) begun: u64,
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
        let mut batch = self.numbered(gradients)?;
        self.add_batch(&mut batch, weight)
    }

    /// Gradients by their parameters' numbers in the layout.
    pub(crate) fn numbered<'a, G: HasGradients + ?Sized>(
        &self,
        gradients: &'a G,
    ) -> Result<Vec<(usize, TensorView<'a>)>> {
        let mut batch = Vec::new();
        let mut unknown = None;
        gradients.for_each_gradient(&mut |id, view| match self.store.layout().index_of(id) {
            Some(param) => batch.push((param, view)),
            None => unknown = unknown.or(Some(id)),
        })?;
        match unknown {
            Some(id) => Err(Error::UnknownParameter { parameter: id.to_string() }),
            None => Ok(batch),
        }
    }
}

impl<S: Store> GradientAccumulator<S> {
    pub(crate) fn new(schedule: Schedule, store: S, policy: Policy) -> Self {
        Self { window: Window::first(schedule), store, policy, last: None, parts: None, begun: 0 }
    }

    /// Refuses gradients that lie in memory which an earlier window has handed over. To a trainer that keeps gradients in
    /// one place and adds to them, that happens if they were not cleared after the optimizer's step: they would count
    /// twice.
    ///
    /// # Errors
    /// [`TensorError::HandedOver`](crate::TensorError::HandedOver) for the first such gradient.
    pub fn check_fresh(&self, batch: &[(usize, S::Tensor<'_>)]) -> Result<()> {
        match batch.iter().find(|(_, gradient)| self.store.has_handed_over(gradient)) {
            Some(&(param, _)) => Err(TensorError::HandedOver.of(self.name(param))),
            None => Ok(()),
        }
    }

    /// Adds one micro-batch whose gradients go by their parameters' numbers in the layout. They are sorted by them.
    ///
    /// # Errors
    /// As for [`add`](GradientAccumulator::add). Panics if there is no parameter of a number.
    pub fn add_batch(&mut self, batch: &mut [(usize, S::Tensor<'_>)], weight: Weight) -> Result<Added> {
        self.check_no_parts()?;
        let goal = self.window.admit(weight)?;
        self.check(batch)?;
        self.check_missing(batch)?;
        let (scale, policy) = (weight.scale(), self.policy);
        let last = if scale == 0.0 {
            Last { finite: true, norm: None }
        } else {
            let report = if policy.on_nonfinite == OnNonFinite::Propagate {
                self.add_to_store(batch, scale, policy.micro_norms)?
            } else {
                let report = self.store.examine(batch, policy.micro_norms)?;
                match report.first_nonfinite {
                    Some(place) if policy.on_nonfinite == OnNonFinite::Raise => {
                        return Err(Error::NonFinite { parameter: self.name(batch[place].0), is_added: false });
                    }
                    Some(_) => {
                        self.last = Some(Last::new(report.first_nonfinite, report.sum_of_squares, policy));
                        self.window.reject(goal);
                        return Ok(Added { complete: false, skipped: true });
                    }
                    None => self.add_to_store(batch, scale, false)?,
                };
                report
            };
            Last::new(report.first_nonfinite, report.sum_of_squares, policy)
        };
        self.window.mark(scale, batch.iter().map(|&(param, _)| param));
        self.window.count(weight, goal, batch.is_empty());
        self.last = Some(last);
        Ok(Added { complete: self.window.is_complete(), skipped: false })
    }

    /// Adds to the sums. The window is broken, if the store fails when something may have been added.
    pub(crate) fn add_to_store(&mut self, batch: &[(usize, S::Tensor<'_>)], scale: f64, norm: bool) -> Result<Report> {
        let added = self.store.add(batch, scale, self.window.seen(), norm);
        if let Err(Error::Store { is_added: true, .. }) = added {
            self.window.break_off();
        }
        added
    }

    /// Sorts a batch, and refuses it for everything that can be told without reading its elements.
    pub(crate) fn check(&self, batch: &mut [(usize, S::Tensor<'_>)]) -> Result<()> {
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
        Ok(())
    }

    /// Refuses a sorted batch that lacks gradients, if all are asked for.
    fn check_missing(&self, batch: &[(usize, S::Tensor<'_>)]) -> Result<()> {
        if self.policy.on_missing == OnMissing::Error && batch.len() < self.store.layout().len() {
            let missing = (0..).zip(batch).find(|(param, entry)| *param != entry.0);
            let missing = missing.map_or(batch.len(), |(param, _)| param);
            return Err(Error::MissingGradient { parameter: self.name(missing) });
        }
        Ok(())
    }

    /// Refuses what has no place within a micro-batch that comes in parts.
    pub(crate) fn check_no_parts(&self) -> Result<(), WindowError> {
        if self.parts.is_some() { Err(WindowError::MicroBatchOpen) } else { Ok(()) }
    }

    pub(crate) fn name(&self, param: usize) -> String {
        self.store.layout().spec(param).name.clone()
    }

    /// Closes the window and hands its gradients over; the next one opens. Costs the same whatever the size, unless all
    /// that was added for a parameter was masked.
    ///
    /// # Errors
    /// [`Error::Window`] if the window is empty or broken, a micro-batch is coming in parts, or a mean is asked for and its
    /// weight is 0 though something was added. The window is kept then.
    pub fn take(&mut self) -> Result<S::Taken> {
        let share = self.share()?;
        self.take_shared(&[share])
    }

    /// What this window adds to one that is spread over several accumulators, such as those of several processes.
    ///
    /// # Errors
    /// [`Error::Window`] if the window is broken or a micro-batch is coming in parts. It may be empty.
    pub fn share(&self) -> Result<Share> {
        self.check_no_parts()?;
        self.window.share()
    }

    /// Closes the window as a part of one that is spread over several accumulators: with the weight, the counts and the
    /// parameters of all of them, whose `shares` include this one's own. The sums are only this accumulator's, zero for
    /// parameters that others saw: it is the caller's part to add up those of all.
    ///
    /// # Errors
    /// As for [`take`](Self::take), of the whole; and [`Error::Argument`] if a share is of other parameters.
    pub fn take_shared(&mut self, shares: &[Share]) -> Result<S::Taken> {
        self.check_no_parts()?;
        let closing = self.window.close(shares, self.policy.reduction)?;
        let taken = self.store.take(closing)?;
        self.window.advance();
        Ok(taken)
    }

    /// Forgets what the window holds, and the parts of a micro-batch that has not ended. It stays the same window, and is
    /// empty.
    pub fn reset(&mut self) {
        self.parts = None;
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

    /// Adds to the weight of the window: that of micro-batches which were added with weight 0, because theirs was not
    /// known yet.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is negative or not finite. The window is broken then.
    pub fn add_weight(&mut self, weight: f64) -> Result<()> {
        self.window.add_weight(weight)
    }

    /// Completes windows otherwise from now on. One that is open keeps its length.
    pub fn set_schedule(&mut self, schedule: Schedule) {
        self.window.set_schedule(schedule);
    }

    /// Tells how many micro-batches the window of a number is to have, where the schedule is [`Schedule::Told`]. Good for
    /// the next micro-batch only, if that opens this window.
    ///
    /// # Errors
    /// [`Error::Argument`] if the number is 0.
    pub fn set_next_length(&mut self, window: u64, micro_batches: u64) -> Result<()> {
        self.window.tell(window, at_least_1(micro_batches)?);
        Ok(())
    }

    /// The parameters and where their sums lie.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// Micro-batches added to this window.
    pub fn count(&self) -> u64 {
        self.window.counters().count
    }

    /// The weight of this window so far.
    pub fn weight(&self) -> f64 {
        self.window.counters().weight
    }

    /// Micro-batches of this window that were skipped for being non-finite.
    pub fn rejected(&self) -> u64 {
        self.window.counters().rejected
    }

    /// Whether the window has all its micro-batches.
    pub fn is_complete(&self) -> bool {
        self.window.is_complete()
    }

    /// How many windows were taken before this one.
    pub fn window(&self) -> u64 {
        self.window.index()
    }

    /// What completes this window; None if that is still to be told. Fixed once it holds a micro-batch.
    pub fn goal(&self) -> Option<Goal> {
        self.window.goal()
    }

    /// What is known of the last micro-batch, of whichever window.
    pub fn last(&self) -> Option<Last> {
        self.last
    }
}

impl Last {
    pub(crate) fn new(first_nonfinite: Option<usize>, sum_of_squares: f64, policy: Policy) -> Self {
        Self { finite: first_nonfinite.is_none(), norm: policy.micro_norms.then(|| sum_of_squares.sqrt()) }
    }
}
