//! A micro-batch that comes in parts: gradients one parameter at a time, or one parameter several times.

use crate::accumulator::{Added, GradientAccumulator, Last};
use crate::builder::{OnMissing, OnNonFinite};
use crate::error::{Error, Result, WindowError};
use crate::gradients::HasGradients;
use crate::schedule::Goal;
use crate::store::{FlatStore, Store};
use crate::window::Weight;

/// What is known of the parts so far.
pub(crate) struct Parts {
    weight: Weight,
    goal: Goal,
    /// By number of the parameter, as far as one has come.
    has_come: Vec<bool>,
    /// Whether anything was added or marked, so that there is no way back.
    has_begun: bool,
    /// Whether a parameter came more than once, so that the norm of the whole is not known from those of its parts.
    has_repeats: bool,
    first_nonfinite: Option<usize>,
    sum_of_squares: f64,
}

impl<S: Store> GradientAccumulator<S> {
    /// Refuses micro-batches in parts, if non-finite ones are to be skipped: a part that has been added can't be taken
    /// back.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check_parts(&self) -> Result<()> {
        if self.policy.on_nonfinite == OnNonFinite::Skip {
            let reason = "\"skip\" drops a micro-batch as a whole, so it can't come in parts: add it whole, or use \
                          \"propagate\" or \"raise\"";
            return Err(Error::argument("on_nonfinite", reason));
        }
        Ok(())
    }

    /// Begins a micro-batch that comes in parts. Until [`end_micro_batch`](Self::end_micro_batch) nothing else can be
    /// added or taken.
    ///
    /// # Errors
    /// As for [`add`](GradientAccumulator::add); and for [`check_parts`](Self::check_parts).
    pub fn begin_micro_batch(&mut self, weight: Weight) -> Result<()> {
        self.check_no_parts()?;
        self.check_parts()?;
        let goal = self.window.admit(weight)?;
        self.begun += 1;
        self.parts = Some(Parts {
            weight,
            goal,
            has_come: Vec::new(),
            has_begun: false,
            has_repeats: false,
            first_nonfinite: None,
            sum_of_squares: 0.0,
        });
        Ok(())
    }

    /// The micro-batch that is open, by a number that no other of this accumulator has; None if none is.
    pub fn open_micro_batch(&self) -> Option<u64> {
        self.parts.as_ref().map(|_| self.begun)
    }

    /// Adds part of the micro-batch that is open, whose gradients go by their parameters' numbers in the layout. They are
    /// sorted by them.
    ///
    /// # Errors
    /// [`WindowError::NoMicroBatch`] if none is open, and what does not fit. Then nothing of this part has been written.
    /// Panics if there is no parameter of a number.
    pub fn add_part_batch(&mut self, batch: &mut [(usize, S::Tensor<'_>)]) -> Result<()> {
        let Some(parts) = &self.parts else { return Err(WindowError::NoMicroBatch.into()) };
        self.check(batch)?;
        let scale = parts.weight.scale();
        let report = match scale {
            0.0 => None,
            _ => Some(self.add_to_store(batch, scale, self.policy.micro_norms)?),
        };
        self.window.mark(scale, batch.iter().map(|&(param, _)| param));
        let Some(parts) = &mut self.parts else { return Ok(()) };
        parts.has_begun |= !batch.is_empty();
        if let Some(report) = report {
            parts.sum_of_squares += report.sum_of_squares;
            parts.first_nonfinite = parts.first_nonfinite.or(report.first_nonfinite.map(|place| batch[place].0));
        }
        parts.has_come.resize(self.store.layout().len(), false);
        for &(param, _) in &*batch {
            parts.has_repeats |= std::mem::replace(&mut parts.has_come[param], true);
        }
        Ok(())
    }

    /// Ends the micro-batch: it counts now, its weight once. [`Last::norm`] is None if a parameter came more than once.
    ///
    /// # Errors
    /// [`WindowError::NoMicroBatch`] if none is open. [`Error::NonFinite`] and [`Error::MissingGradient`], where the
    /// policies say so: then its parts are in the sums, and the window is broken until it is reset.
    pub fn end_micro_batch(&mut self) -> Result<Added> {
        let Some(parts) = self.parts.take() else { return Err(WindowError::NoMicroBatch.into()) };
        let policy = self.policy;
        let missing =
            (0..self.store.layout().len()).find(|&param| !parts.has_come.get(param).is_some_and(|&come| come));
        let refused = match (parts.first_nonfinite, missing) {
            (Some(param), _) if policy.on_nonfinite == OnNonFinite::Raise => {
                Some(Error::NonFinite { parameter: self.name(param), is_added: true })
            }
            (_, Some(param)) if policy.on_missing == OnMissing::Error => {
                Some(Error::MissingGradient { parameter: self.name(param) })
            }
            _ => None,
        };
        if let Some(error) = refused {
            self.abandon(&parts);
            return Err(error);
        }
        self.window.count(parts.weight, parts.goal, !parts.has_begun);
        let mut last = Last::new(parts.first_nonfinite, parts.sum_of_squares, policy);
        if parts.has_repeats || parts.weight.scale() == 0.0 {
            last.norm = None;
        }
        self.last = Some(last);
        Ok(Added { complete: self.window.is_complete(), skipped: false })
    }

    /// Gives the open micro-batch up, if there is one. If a part of it has been added, the window is broken until it is
    /// reset.
    pub fn abandon_micro_batch(&mut self) {
        if let Some(parts) = self.parts.take() {
            self.abandon(&parts);
        }
    }

    fn abandon(&mut self, parts: &Parts) {
        if parts.has_begun {
            self.window.break_off();
        }
    }
}

impl GradientAccumulator {
    /// Begins a micro-batch that comes in parts, which count as one and weigh once.
    ///
    /// ```
    /// use gradacc::{DType, GradientAccumulator, ParamId, TensorView, Weight};
    ///
    /// let id = ParamId(0);
    /// let mut accumulator = GradientAccumulator::builder().param(id, &[1], DType::F32).build()?;
    /// let mut micro_batch = accumulator.micro_batch(Weight::new(2.0)?)?;
    /// for part in [[1.0_f32], [3.0]] {
    ///     micro_batch.add_part(&[(id, TensorView::from_slice(&part, &[1])?)][..])?;
    /// }
    /// micro_batch.end()?;
    /// assert_eq!((accumulator.count(), accumulator.weight()), (1, 2.0));
    /// assert_eq!(accumulator.take()?.get(id)?.unwrap().as_slice::<f32>()?, [4.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`begin_micro_batch`](Self::begin_micro_batch).
    pub fn micro_batch(&mut self, weight: Weight) -> Result<MicroBatch<'_>> {
        self.begin_micro_batch(weight)?;
        Ok(MicroBatch(self))
    }
}

/// A micro-batch that comes in parts. Dropped before its [`end`](Self::end), it is given up: if a part of it has been
/// added, the window is broken until it is reset.
pub struct MicroBatch<'a>(&'a mut GradientAccumulator<FlatStore>);

impl MicroBatch<'_> {
    /// Adds gradients of some parameters, which may have come before. They are read, and neither kept nor changed.
    ///
    /// # Errors
    /// What does not fit. Then nothing of this part has been written.
    pub fn add_part<G: HasGradients + ?Sized>(&mut self, gradients: &G) -> Result<()> {
        let mut batch = self.0.numbered(gradients)?;
        self.0.add_part_batch(&mut batch)
    }

    /// Counts the micro-batch.
    ///
    /// # Errors
    /// As for [`end_micro_batch`](GradientAccumulator::end_micro_batch).
    pub fn end(self) -> Result<Added> {
        self.0.end_micro_batch()
    }
}

impl Drop for MicroBatch<'_> {
    fn drop(&mut self) {
        self.0.abandon_micro_batch();
    }
}
