//! What a window counts, and when it is complete. Written once, for every store.

use std::num::NonZeroU64;

use crate::error::{Error, Result, WindowError};
use crate::schedule::{Goal, Schedule};
use crate::store::Closing;

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seen {
    /// No micro-batch had it.
    #[default]
    Never,
    /// Only micro-batches of scale 0 had it: its sum is zero and nothing has been written.
    Masked,
    /// Its sum has been written.
    Written,
}

/// What is counted in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// What completes it; None before its first micro-batch.
    pub goal: Option<Goal>,
    /// Micro-batches added.
    pub count: u64,
    /// Their weight.
    pub weight: f64,
    /// Micro-batches skipped for being non-finite.
    pub rejected: u64,
    /// Whether any micro-batch had a gradient, and a scale other than 0.
    pub has_sums: bool,
}

impl Counters {
    /// What the sums are to be divided by, if a window that counts this may be closed.
    fn divisor(&self, reduction: Reduction) -> Result<f64> {
        let &Self { count, weight, rejected, has_sums, .. } = self;
        match reduction {
            _ if count == 0 => Err(WindowError::Empty { rejected }.into()),
            _ if !weight.is_finite() => {
                Err(Error::argument("weight", "the weight of the window exceeds the largest number"))
            }
            Reduction::Sum => Ok(1.0),
            Reduction::Mean if weight > 0.0 => Ok(weight),
            // All was masked: zeros, whatever they are divided by.
            Reduction::Mean if !has_sums => Ok(1.0),
            Reduction::Mean => Err(WindowError::NoWeight.into()),
        }
    }
}

/// What one accumulator adds to a window that is spread over several.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// What it counts.
    pub counters: Counters,
    /// How it has seen each parameter, by number.
    pub seen: Vec<Seen>,
}

/// A window and its place in the schedule.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    schedule: Schedule,
    /// A length for the window of a number, good for its next micro-batch only.
    told: Option<(u64, NonZeroU64)>,
    index: u64,
    counters: Counters,
    seen: Vec<Seen>,
    /// Whether part of a micro-batch that failed is in the sums.
    is_broken: bool,
}

impl Window {
    /// The first window of an accumulator.
    pub(crate) fn first(schedule: Schedule) -> Self {
        Self { schedule, ..Self::default() }
    }

    /// Another schedule, for windows that are not open yet.
    pub(crate) fn set_schedule(&mut self, schedule: Schedule) {
        self.schedule = schedule;
    }

    /// A length for the window of a number, if a micro-batch that follows opens it.
    pub(crate) fn tell(&mut self, window: u64, length: NonZeroU64) {
        self.told = Some((window, length));
    }

    /// Makes room for a parameter.
    pub(crate) fn register(&mut self) {
        self.seen.push(Seen::Never);
    }

    /// What completes this window, fixed or not; None if that is still to be told.
    pub(crate) fn goal(&self) -> Option<Goal> {
        self.counters.goal.or_else(|| self.schedule.goal(self.index))
    }

    /// Whether another micro-batch of this weight may be added; and what completes the window it belongs to.
    pub(crate) fn admit(&mut self, weight: Weight) -> Result<Goal> {
        let told = self.told.take().filter(|&(window, _)| window == self.index);
        self.check_whole()?;
        if self.is_complete() {
            return Err(WindowError::Complete { count: self.counters.count }.into());
        }
        if !(self.counters.weight + weight.weight).is_finite() {
            return Err(Error::argument("weight", "the weight of the window would exceed the largest number"));
        }
        let goal = self.goal().or(told.map(|(_, length)| Goal::Count(length)));
        Ok(goal.ok_or(WindowError::NoLength { window: self.index })?)
    }

    /// Counts a micro-batch that was admitted for a goal, and whose parameters have been marked, if it had any.
    pub(crate) fn count(&mut self, weight: Weight, goal: Goal, is_empty: bool) {
        self.counters.goal = Some(goal);
        self.counters.count += 1;
        self.counters.weight += weight.weight;
        self.counters.has_sums |= weight.scale != 0.0 && !is_empty;
    }

    /// Adds the weight of micro-batches that were counted without it.
    pub(crate) fn add_weight(&mut self, weight: f64) -> Result<()> {
        let checked = Weight::new(weight).and_then(|_| match self.counters.weight + weight {
            sum if sum.is_finite() => Ok(sum),
            _ => Err(Error::argument("weight", "the weight of the window would exceed the largest number")),
        });
        match checked {
            Ok(sum) => self.counters.weight = sum,
            Err(_) => self.break_off(),
        }
        checked.map(|_| ())
    }

    /// Marks parameters as seen by a micro-batch of some scale.
    pub(crate) fn mark(&mut self, scale: f64, params: impl Iterator<Item = usize>) {
        for param in params {
            let seen = &mut self.seen[param];
            *seen = match (*seen, scale != 0.0) {
                (_, true) | (Seen::Written, false) => Seen::Written,
                (_, false) => Seen::Masked,
            };
        }
    }

    /// Counts a micro-batch that was admitted for a goal, and skipped.
    pub(crate) fn reject(&mut self, goal: Goal) {
        self.counters.goal = Some(goal);
        self.counters.rejected += 1;
    }

    /// Notes that part of a micro-batch that failed is in the sums.
    pub(crate) fn break_off(&mut self) {
        self.is_broken = true;
    }

    /// Refuses a window that is broken.
    pub(crate) fn check_whole(&self) -> Result<(), WindowError> {
        if self.is_broken { Err(WindowError::Broken) } else { Ok(()) }
    }

    /// What this window adds to one that is spread over several accumulators.
    pub(crate) fn share(&self) -> Result<Share> {
        self.check_whole()?;
        Ok(Share { counters: self.counters, seen: self.seen.clone() })
    }

    /// What the sums of this window are handed over with, as a part of all that is shared.
    pub(crate) fn close(&self, shares: &[Share], reduction: Reduction) -> Result<Closing> {
        self.check_whole()?;
        let mut all = Counters::default();
        let mut seen = vec![Seen::Never; self.seen.len()];
        for share in shares {
            if share.seen.len() != seen.len() {
                let reason = format!("expected {} parameters, got one of {}", seen.len(), share.seen.len());
                return Err(Error::argument("shares", reason));
            }
            all.count += share.counters.count;
            all.weight += share.counters.weight;
            all.rejected += share.counters.rejected;
            all.has_sums |= share.counters.has_sums;
            seen.iter_mut().zip(&share.seen).for_each(|(of_all, &one)| *of_all = (*of_all).max(one));
        }
        let seen = (0..).zip(seen).filter(|&(_, of_all)| of_all != Seen::Never);
        Ok(Closing {
            seen: seen.map(|(param, _)| (param, self.seen[param] == Seen::Written)).collect(),
            divisor: all.divisor(reduction)?,
            count: all.count,
            weight: all.weight,
            rejected: all.rejected,
        })
    }

    /// Opens the next window.
    pub(crate) fn advance(&mut self) {
        self.index += 1;
        self.reset();
    }

    /// Forgets what this window holds.
    pub(crate) fn reset(&mut self) {
        self.counters = Counters::default();
        self.is_broken = false;
        self.seen.fill(Seen::Never);
    }

    /// Becomes another window. There is one entry of `seen` for each parameter.
    pub(crate) fn restore(&mut self, index: u64, counters: Counters, seen: Vec<Seen>) {
        debug_assert_eq!(seen.len(), self.seen.len());
        (self.index, self.counters, self.seen, self.is_broken) = (index, counters, seen, false);
    }

    pub(crate) fn is_complete(&self) -> bool {
        let Counters { goal, count, weight, .. } = self.counters;
        goal.is_some_and(|goal| goal.is_reached(count, weight))
    }

    /// How many windows were closed before this one.
    pub(crate) fn index(&self) -> u64 {
        self.index
    }

    pub(crate) fn counters(&self) -> Counters {
        self.counters
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

    fn window(schedule: Schedule) -> Window {
        let mut window = Window::first(schedule);
        window.register();
        window.register();
        window
    }

    fn add(window: &mut Window, weight: Weight, params: &[usize]) {
        let goal = window.admit(weight).unwrap();
        window.mark(weight.scale(), params.iter().copied());
        window.count(weight, goal, params.is_empty());
    }

    #[test]
    fn a_complete_window_admits_nothing() {
        let mut window = window(Schedule::every(2).unwrap());
        for complete in [false, true] {
            add(&mut window, Weight::ONE, &[0]);
            assert_eq!(window.is_complete(), complete);
        }
        assert_eq!(window.admit(Weight::ONE), Err(WindowError::Complete { count: 2 }.into()));
        window.advance();
        assert!(window.admit(Weight::ONE).is_ok());
        assert_eq!((window.index(), window.counters()), (1, Counters::default()));
    }

    #[test]
    fn the_goal_is_fixed_by_the_first_micro_batch() {
        let count = |n| Goal::Count(NonZeroU64::new(n).unwrap());
        let mut window = window(Schedule::every(4).unwrap());
        window.reject(count(4));
        window.set_schedule(Schedule::every(2).unwrap());
        assert_eq!(window.goal(), Some(count(4)));
        window.reset();
        assert_eq!(window.goal(), Some(count(2)));
    }

    #[test]
    fn a_length_that_is_told_is_good_for_one_micro_batch() {
        let (untold, two) = (WindowError::NoLength { window: 0 }, NonZeroU64::new(2).unwrap());
        let mut window = window(Schedule::Told);
        assert_eq!(window.admit(Weight::ONE), Err(untold.into()));
        window.tell(1, two);
        assert_eq!(window.admit(Weight::ONE), Err(untold.into()));
        window.tell(0, two);
        assert_eq!(window.admit(Weight::ONE), Ok(Goal::Count(two)));
        // That one was refused for some other reason.
        assert_eq!(window.admit(Weight::ONE), Err(untold.into()));
        window.tell(0, two);
        add(&mut window, Weight::ONE, &[]);
        add(&mut window, Weight::ONE, &[]);
        assert!(window.is_complete());
    }

    #[test]
    fn a_weight_that_comes_late() {
        let mut window = window(Schedule::Open);
        add(&mut window, weight(0.0, 1.0), &[0]);
        window.add_weight(3.5).unwrap();
        assert_eq!(divisor(&window, Reduction::Mean), Ok(3.5));
        for wrong in [-1.0, f64::NAN, f64::MAX] {
            let mut window = window.clone();
            window.counters.weight = f64::MAX;
            assert!(window.add_weight(wrong).is_err());
            assert_eq!(window.share(), Err(WindowError::Broken.into()));
        }
    }

    #[test]
    fn a_weight_completes_a_window() {
        let mut window = window(Schedule::until_weight(10.0).unwrap());
        for (by, complete) in [(4.0, false), (5.5, false), (0.0, false), (0.5, true)] {
            add(&mut window, Weight::new(by).unwrap(), &[]);
            assert_eq!(window.is_complete(), complete);
        }
    }

    fn divisor(window: &Window, reduction: Reduction) -> Result<f64> {
        Ok(window.close(&[window.share()?], reduction)?.divisor)
    }

    #[test]
    fn the_divisor_is_the_weight_of_what_was_counted() {
        let mut window = window(Schedule::Open);
        window.reject(Goal::Open);
        assert_eq!(divisor(&window, Reduction::Mean), Err(WindowError::Empty { rejected: 1 }.into()));
        add(&mut window, weight(0.0, 0.0), &[1]);
        assert_eq!(divisor(&window, Reduction::Mean), Ok(1.0));
        add(&mut window, weight(0.0, 2.0), &[0]);
        assert_eq!(divisor(&window, Reduction::Mean), Err(WindowError::NoWeight.into()));
        assert_eq!(divisor(&window, Reduction::Sum), Ok(1.0));
        add(&mut window, weight(2.5, 2.5), &[]);
        assert_eq!(divisor(&window, Reduction::Mean), Ok(2.5));
    }

    #[test]
    fn a_broken_window_is_good_for_nothing_but_a_reset() {
        let mut window = window(Schedule::Open);
        add(&mut window, Weight::ONE, &[]);
        let share = window.share().unwrap();
        window.break_off();
        assert_eq!(window.share(), Err(WindowError::Broken.into()));
        assert_eq!(window.close(&[share], Reduction::Sum), Err(WindowError::Broken.into()));
        assert_eq!(window.admit(Weight::ONE), Err(WindowError::Broken.into()));
        window.reset();
        assert!(window.admit(Weight::ONE).is_ok());
    }

    #[test]
    fn a_window_that_is_spread_over_several_is_closed_as_one() {
        let [mut here, mut there] = [window(Schedule::Open), window(Schedule::Open)];
        let idle = window(Schedule::Open).share().unwrap();
        add(&mut here, weight(1.0, 1.0), &[0]);
        add(&mut there, weight(0.0, 3.0), &[1]);
        add(&mut there, weight(4.0, 0.0), &[0]);
        there.reject(Goal::Open);
        let shares = [here.share().unwrap(), idle.clone(), there.share().unwrap()];
        let closing = |seen: [(usize, bool); 2]| {
            let (divisor, count, weight, rejected) = (5.0, 3, 5.0, 1);
            Ok(Closing { seen: seen.into(), divisor, count, weight, rejected })
        };
        assert_eq!(here.close(&shares, Reduction::Mean), closing([(0, true), (1, false)]));
        assert_eq!(there.close(&shares, Reduction::Mean), closing([(0, false), (1, true)]));
        // A mean over weight 0 is none of one part alone.
        assert_eq!(here.close(&[shares[2].clone()], Reduction::Mean).unwrap().divisor, 4.0);
        assert_eq!(here.close(&[idle], Reduction::Mean), Err(WindowError::Empty { rejected: 0 }.into()));
        let other = Share { counters: Counters::default(), seen: vec![Seen::Never] };
        assert!(matches!(here.close(&[other], Reduction::Mean), Err(Error::Argument { name: "shares", .. })));
    }

    #[test]
    fn a_parameter_once_written_stays_written() {
        let mut window = window(Schedule::Open);
        add(&mut window, weight(1.0, 0.0), &[0, 1]);
        assert_eq!(window.seen(), [Seen::Masked, Seen::Masked]);
        add(&mut window, Weight::ONE, &[1]);
        add(&mut window, weight(1.0, 0.0), &[1]);
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
        let mut window = window(Schedule::Open);
        add(&mut window, Weight::new(f64::MAX).unwrap(), &[]);
        assert!(window.admit(Weight::new(f64::MAX).unwrap()).is_err());
    }
}
