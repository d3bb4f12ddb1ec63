//! How long windows are.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use crate::error::{Error, Result};

/// Lengths that hold from a position on: from a window, or from an epoch. Before the first of them the length is 1.
///
/// ```
/// let lengths = gradacc::Lengths::new([(5, 2), (10, 4)])?;
/// assert_eq!([0, 4, 5, 9, 10, 1000].map(|epoch| lengths.at(epoch).get()), [1, 1, 2, 2, 4, 4]);
/// # Ok::<(), gradacc::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lengths(BTreeMap<u64, NonZeroU64>);

impl Lengths {
    /// Pairs of a position and the length that holds from it on, in any order.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are none, one position comes twice, or a length is 0.
    pub fn new(lengths: impl IntoIterator<Item = (u64, u64)>) -> Result<Self> {
        let mut map = BTreeMap::new();
        for (from, length) in lengths {
            if map.insert(from, at_least_1(length)?).is_some() {
                return Err(Error::argument("every", format!("two lengths are given from {from} on")));
            }
        }
        if map.is_empty() {
            return Err(Error::argument("every", "expected a schedule of one length or more, got none"));
        }
        Ok(Self(map))
    }

    /// The length that holds at a position.
    pub fn at(&self, position: u64) -> NonZeroU64 {
        self.0.range(..=position).next_back().map_or(NonZeroU64::MIN, |(_, &length)| length)
    }
}

/// What completes a window. It is fixed for each when its first micro-batch arrives, and holds until it is taken.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Schedule {
    /// Nothing does: the caller decides.
    #[default]
    Open,
    /// So many micro-batches.
    Every(NonZeroU64),
    /// So many micro-batches, depending on how many windows were taken before.
    FromWindow(Lengths),
    /// So many micro-batches, of which
    /// [`set_next_length`](crate::GradientAccumulator::set_next_length) tells before the first of a window arrives.
    Told,
    /// A weight of at least so much, for windows of so many tokens.
    UntilWeight(f64),
}

impl Schedule {
    /// A window is complete after so many micro-batches.
    ///
    /// # Errors
    /// [`Error::Argument`] if that is 0.
    pub fn every(micro_batches: u64) -> Result<Self> {
        at_least_1(micro_batches).map(Self::Every)
    }

    /// A window is complete once it weighs so much.
    ///
    /// # Errors
    /// [`Error::Argument`] unless that is finite and above 0.
    pub fn until_weight(weight: f64) -> Result<Self> {
        if weight.is_finite() && weight > 0.0 {
            Ok(Self::UntilWeight(weight))
        } else {
            Err(Error::argument("until_weight", format!("expected a finite number above 0, got {weight}")))
        }
    }

    /// What completes a window of this number; None if nobody has told yet.
    pub(crate) fn goal(&self, window: u64) -> Option<Goal> {
        match self {
            Self::Open => Some(Goal::Open),
            Self::Every(every) => Some(Goal::Count(*every)),
            Self::FromWindow(lengths) => Some(Goal::Count(lengths.at(window))),
            Self::Told => None,
            Self::UntilWeight(weight) => Some(Goal::Weight(*weight)),
        }
    }
}

/// What completes one window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// Nothing: the caller decides.
    Open,
    /// So many micro-batches.
    Count(NonZeroU64),
    /// A weight of at least so much.
    Weight(f64),
}

impl Goal {
    pub(crate) fn is_reached(self, count: u64, weight: f64) -> bool {
        match self {
            Self::Open => false,
            Self::Count(every) => count >= every.get(),
            Self::Weight(until) => weight >= until,
        }
    }
}

pub(crate) fn at_least_1(length: u64) -> Result<NonZeroU64> {
    NonZeroU64::new(length).ok_or_else(|| Error::argument("every", "expected a whole number of at least 1, got 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_holds_from_its_position_on() {
        let lengths = Lengths::new([(10, 4), (0, 1), (5, 2)]).unwrap();
        let at: Vec<u64> = (0..12).map(|window| lengths.at(window).get()).collect();
        assert_eq!(at, [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 4, 4]);
        assert_eq!(lengths.at(u64::MAX).get(), 4);
    }

    #[test]
    fn what_is_no_schedule() {
        for wrong in [&[][..], &[(0, 0)], &[(0, 1), (3, 0)], &[(2, 1), (2, 3)]] {
            assert!(matches!(Lengths::new(wrong.iter().copied()), Err(Error::Argument { name: "every", .. })));
        }
        assert!(Schedule::every(0).is_err());
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(Schedule::until_weight(wrong), Err(Error::Argument { name: "until_weight", .. })));
        }
    }
}
