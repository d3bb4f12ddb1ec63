//! What a window counts, and when it is complete. Written once, for every store.

use std::num::NonZeroU64;

use crate::error::{Error, Result, WindowError};

/// What a micro-batch counts for, and what its gradients are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weight {
    weight: f64,
    scale: f64,
}

impl Weight {
    /// The weight of one sample.
    pub const ONE: Self = Self { weight: 1.0, scale: 1.0 };

    /// A micro-batch that counts for `weight` samples or tokens, and whose loss was their mean: its gradients are
    /// multiplied with the weight.
    ///
    /// # Errors
    /// [`Error::Argument`] if the weight is negative, NaN or infinite.
    pub fn new(weight: f64) -> Result<Self> {
        if weight.is_finite() && weight >= 0.0 {
            Ok(Self { weight, scale: weight })
        } else {
            Err(Error::argument("weight", format!("expected a finite number of at least 0, got {weight}")))
        }
    }

    /// The same weight with another factor for the gradients: 1 if the loss was a sum, weight / L if it was scaled by L.
    ///
    /// # Errors
    /// [`Error::Argument`] if the scale is NaN or infinite. It may be negative, and at 0 the gradients are not read.
    pub fn with_scale(self, scale: f64) -> Result<Self> {
        if scale.is_finite() {
            Ok(Self { scale, ..self })
        } else {
            Err(Error::argument("scale", format!("expected a finite number, got {scale}")))
        }
    }

    /// What it adds to the divisor.
    pub fn weight(self) -> f64 {
        self.weight
    }

    /// What the gradients are multiplied with.
    pub fn scale(self) -> f64 {
        self.scale
    }
}

/// What `take` gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The weighted mean: the sum over the window's weight.
    #[default]
    Mean,
    /// The sum.
    Sum,
}

/// What is known of one parameter in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seen {
    /// No micro-batch had it.
    #[default]
    Never,
    /// Only micro-batches of scale 0 had it: its sum is zero and nothing has been written.
    Masked,
    /// Its sum has been written.
    Written,
}

/// The counters of a window, and the ids it has seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    every: Option<NonZeroU64>,
    index: u64,
    count: u64,
    weight: f64,
    rejected: u64,
    /// Whether any micro-batch had a scale other than 0.
    has_sums: bool,
    seen: Vec<Seen>,
}

impl Window {
    /// The first window of an accumulator whose windows are `every` micro-batches long, or as long as the caller likes.
    pub(crate) fn first(every: Option<NonZeroU64>) -> Self {
        Self { every, ..Self::default() }
    }

    /// Makes room for a parameter.
    pub(crate) fn register(&mut self) {
        self.seen.push(Seen::Never);
    }

    /// Whether another micro-batch of this weight may be added.
    pub(crate) fn admit(&self, weight: Weight) -> Result<()> {
        if self.is_complete() {
            return Err(WindowError::Complete { count: self.count }.into());
        }
        if (self.weight + weight.weight).is_finite() {
            Ok(())
        } else {
            Err(Error::argument("weight", "the weight of the window would exceed the largest number"))
        }
    }

    /// Counts a micro-batch that has been added and had these parameters.
    pub(crate) fn count(&mut self, weight: Weight, params: impl Iterator<Item = usize>) {
        self.count += 1;
        self.weight += weight.weight;
        self.has_sums |= weight.scale != 0.0;
        for param in params {
            let seen = &mut self.seen[param];
            *seen = match (*seen, weight.scale != 0.0) {
                (_, true) | (Seen::Written, false) => Seen::Written,
                (_, false) => Seen::Masked,
            };
        }
    }

    /// Counts a micro-batch that was skipped.
    pub(crate) fn reject(&mut self) {
        self.rejected += 1;
    }

    /// What the sums are to be divided by, if the window may be closed.
    pub(crate) fn divisor(&self, reduction: Reduction) -> Result<f64, WindowError> {
        match reduction {
            _ if self.count == 0 => Err(WindowError::Empty { rejected: self.rejected }),
            Reduction::Sum => Ok(1.0),
            Reduction::Mean if self.weight > 0.0 => Ok(self.weight),
            // All was masked: zeros, whatever they are divided by.
            Reduction::Mean if !self.has_sums => Ok(1.0),
            Reduction::Mean => Err(WindowError::NoWeight),
        }
    }

    /// Opens the next window.
    pub(crate) fn advance(&mut self) {
        self.index += 1;
        self.reset();
    }

    /// Forgets what this window holds.
    pub(crate) fn reset(&mut self) {
        let seen = std::mem::take(&mut self.seen);
        *self = Self { every: self.every, index: self.index, seen, ..Self::default() };
        self.seen.fill(Seen::Never);
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.every.is_some_and(|every| self.count >= every.get())
    }

    pub(crate) fn every(&self) -> Option<NonZeroU64> {
        self.every
    }

    /// How many windows were closed before this one.
    pub(crate) fn index(&self) -> u64 {
        self.index
    }

    /// Micro-batches added so far.
    pub(crate) fn len(&self) -> u64 {
        self.count
    }

    pub(crate) fn weight(&self) -> f64 {
        self.weight
    }

    pub(crate) fn rejected(&self) -> u64 {
        self.rejected
    }

    /// By number of the parameter.
    pub(crate) fn seen(&self) -> &[Seen] {
        &self.seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight(weight: f64, scale: f64) -> Weight {
        Weight::new(weight).unwrap().with_scale(scale).unwrap()
    }

    fn window(every: u64) -> Window {
        let mut window = Window::first(NonZeroU64::new(every));
        window.register();
        window.register();
        window
    }

    #[test]
    fn a_complete_window_admits_nothing() {
        let mut window = window(2);
        for complete in [false, true] {
            window.admit(Weight::ONE).unwrap();
            window.count(Weight::ONE, [0].into_iter());
            assert_eq!(window.is_complete(), complete);
        }
        assert_eq!(window.admit(Weight::ONE), Err(WindowError::Complete { count: 2 }.into()));
        window.advance();
        assert!(window.admit(Weight::ONE).is_ok());
        assert_eq!((window.index(), window.len(), window.weight()), (1, 0, 0.0));
    }

    #[test]
    fn the_divisor_is_the_weight_of_what_was_counted() {
        let mut window = window(0);
        window.reject();
        assert_eq!(window.divisor(Reduction::Mean), Err(WindowError::Empty { rejected: 1 }));
        window.count(weight(0.0, 0.0), [1].into_iter());
        assert_eq!(window.divisor(Reduction::Mean), Ok(1.0));
        window.count(weight(0.0, 2.0), [0].into_iter());
        assert_eq!(window.divisor(Reduction::Mean), Err(WindowError::NoWeight));
        assert_eq!(window.divisor(Reduction::Sum), Ok(1.0));
        window.count(weight(2.5, 2.5), std::iter::empty());
        assert_eq!(window.divisor(Reduction::Mean), Ok(2.5));
    }

    #[test]
    fn a_parameter_once_written_stays_written() {
        let mut window = window(0);
        window.count(weight(1.0, 0.0), [0, 1].into_iter());
        assert_eq!(window.seen(), [Seen::Masked, Seen::Masked]);
        window.count(Weight::ONE, [1].into_iter());
        window.count(weight(1.0, 0.0), [1].into_iter());
        assert_eq!(window.seen(), [Seen::Masked, Seen::Written]);
        window.reset();
        assert_eq!(window.seen(), [Seen::Never, Seen::Never]);
    }

    #[test]
    fn weights_out_of_range() {
        for wrong in [f64::NAN, f64::INFINITY, -1.0, -f64::MIN_POSITIVE] {
            assert!(matches!(Weight::new(wrong), Err(Error::Argument { name: "weight", .. })));
        }
        assert!(matches!(Weight::ONE.with_scale(f64::NAN), Err(Error::Argument { name: "scale", .. })));
        let mut window = window(0);
        window.count(Weight::new(f64::MAX).unwrap(), std::iter::empty());
        assert!(window.admit(Weight::new(f64::MAX).unwrap()).is_err());
    }
}
