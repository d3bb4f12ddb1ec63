//! What a window holds, so that it can be gone on with elsewhere, bit for bit.

mod file;

use std::collections::HashMap;
use std::fmt;

use crate::accumulator::GradientAccumulator;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::param::{Shape, element_count};
use crate::store::Store;
use crate::window::{Counters, Seen};

/// A window: its place in the schedule, what it counts, and its sums. `B` is what holds the bytes of the sums.
///
/// Parameters go by their names, which are unique, and not by their numbers or ids.
#[derive(Clone, Debug, PartialEq)]
pub struct State<B> {
    /// How many windows were taken before.
    pub window: u64,
    /// What the window counts. Its goal is None if nothing has come yet, and only then.
    pub counters: Counters,
    /// Every parameter, in any order.
    pub params: Vec<ParamState<B>>,
}

/// What a window knows of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamState<B> {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// The dtype it is summed and handed over in.
    pub dtype: DType,
    /// How the window has seen it.
    pub seen: Seen,
    /// Its sums in row-major order, in the byte order of this machine. None if nothing has been written, and only then.
    pub sums: Option<B>,
}

impl<B> State<B> {
    /// The same with the bytes held in another way.
    ///
    /// # Errors
    /// The first that `convert` gives.
    pub fn try_map<C, E>(self, convert: impl Fn(&ParamState<()>, B) -> Result<C, E>) -> Result<State<C>, E> {
        let params = self.params.into_iter().map(|ParamState { name, shape, dtype, seen, sums }| {
            let bare = ParamState { name, shape, dtype, seen, sums: None };
            let sums = sums.map(|sums| convert(&bare, sums)).transpose()?;
            let ParamState { name, shape, dtype, seen, .. } = bare;
            Ok(ParamState { name, shape, dtype, seen, sums })
        });
        Ok(State { window: self.window, counters: self.counters, params: params.collect::<Result<_, E>>()? })
    }
}

impl<S: Store> GradientAccumulator<S> {
    /// What this window holds. Borrows the sums where they lie in host memory.
    ///
    /// ```
    /// use gradacc::{DType, GradientAccumulator, ParamId, TensorView, Weight};
    ///
    /// let builder = GradientAccumulator::builder().param(ParamId(0), &[2], DType::F32);
    /// let (mut first, mut second) = (builder.clone().build()?, builder.build()?);
    /// first.add(&[(ParamId(0), TensorView::from_slice(&[1.0_f32, 2.0], &[2])?)][..], Weight::ONE)?;
    /// second.load_state(&first.state()?)?;
    /// assert_eq!(second.take()?.get(ParamId(0))?.unwrap().as_slice::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Window`] if the window is broken, or a micro-batch is coming in parts. [`Error::State`] if two parameters
    /// have one name.
    pub fn state(&self) -> Result<State<S::Sums<'_>>> {
        self.check_no_parts()?;
        self.window.check_whole()?;
        self.numbers_by_name()?;
        let layout = self.store.layout();
        let param = |(param, &seen): (usize, &Seen)| {
            let spec = layout.spec(param);
            let sums = if seen == Seen::Written { Some(self.store.sums(param)?) } else { None };
            let (name, shape, dtype) = (spec.name.clone(), spec.shape.clone(), layout.sums_dtype(param));
            Ok(ParamState { name, shape, dtype, seen, sums })
        };
        let params = self.window.seen().iter().enumerate().map(param).collect::<Result<_>>()?;
        Ok(State { window: self.window.index(), counters: self.window.counters(), params })
    }

    /// Replaces what this window holds, whatever that is, with a state. Copies its sums. The schedule stays this
    /// accumulator's; a window that has been opened keeps the goal it was opened with.
    ///
    /// # Errors
    /// [`Error::State`] if the parameters are not the same, by name, shape and dtype of sums, or the state contradicts
    /// itself; [`Error::Memory`]. Then nothing has changed.
    pub fn load_state<B: AsRef<[u8]>>(&mut self, state: &State<B>) -> Result<()> {
        let numbers = self.numbers_by_name()?;
        let mut seen = vec![None; numbers.len()];
        let mut sums = Vec::new();
        for param in &state.params {
            let name = &param.name;
            let Some(&number) = numbers.get(name.as_str()) else {
                return Err(refuse(format!("parameter {name} is in the state and not in this accumulator")));
            };
            self.check_param(number, param)?;
            if seen[number].replace(param.seen).is_some() {
                return Err(refuse(format!("parameter {name} is in the state twice")));
            }
            sums.extend(param.sums.as_ref().map(|bytes| (number, bytes.as_ref())));
        }
        if let Some(missing) = seen.iter().position(Option::is_none) {
            let reason = format!("parameter {} is in this accumulator and not in the state", self.name(missing));
            return Err(refuse(reason));
        }
        let seen: Vec<Seen> = seen.into_iter().flatten().collect();
        check_counters(&state.counters, &seen)?;
        if state.window > i64::MAX as u64 {
            return Err(refuse(format!("so many windows can't have been taken: {}", state.window)));
        }
        self.store.load_sums(&sums)?;
        self.window.restore(state.window, state.counters, seen);
        self.parts = None;
        self.last = None;
        Ok(())
    }

    fn check_param<B: AsRef<[u8]>>(&self, number: usize, param: &ParamState<B>) -> Result<()> {
        let (spec, dtype, name) =
            (self.store.layout().spec(number), self.store.layout().sums_dtype(number), &param.name);
        let differs = |what: &str, expected: &dyn fmt::Display, got: &dyn fmt::Display| {
            Err(refuse(format!("parameter {name}: expected {what} {expected}, the state has {got}")))
        };
        if param.shape != spec.shape {
            return differs("shape", &crate::error::Shape(&spec.shape), &crate::error::Shape(&param.shape));
        }
        if param.dtype != dtype {
            return differs("sums of dtype", &dtype, &param.dtype);
        }
        let len_bytes = element_count(&param.shape).map_or(0, |count| count * dtype.len_bytes());
        match &param.sums {
            Some(sums) if sums.as_ref().len() != len_bytes => {
                differs("a sum of so many bytes:", &len_bytes, &sums.as_ref().len())
            }
            sums if sums.is_some() != (param.seen == Seen::Written) => {
                Err(refuse(format!("parameter {name}: it is {}, which contradicts its sum", param.seen.name())))
            }
            _ => Ok(()),
        }
    }

    fn numbers_by_name(&self) -> Result<HashMap<&str, usize>> {
        let layout = self.store.layout();
        let mut numbers = HashMap::with_capacity(layout.len());
        for param in 0..layout.len() {
            let name = layout.spec(param).name.as_str();
            if numbers.insert(name, param).is_some() {
                return Err(refuse(format!("two parameters are called {name}, and a state knows them by their names")));
            }
        }
        Ok(numbers)
    }
}

fn check_counters(counters: &Counters, seen: &[Seen]) -> Result<()> {
    let &Counters { goal, count, weight, rejected, has_sums } = counters;
    let is_written = seen.contains(&Seen::Written);
    if count.max(rejected) > i64::MAX as u64 {
        return Err(refuse(format!("no window holds so many micro-batches: {}", count.max(rejected))));
    }
    if !weight.is_finite() || weight < 0.0 {
        return Err(refuse(format!("expected a finite weight of at least 0, got {weight}")));
    }
    if goal.is_some() != (count > 0 || rejected > 0) {
        return Err(refuse("a window has a length once it has had a micro-batch, and not before"));
    }
    if (count == 0 && (weight != 0.0 || has_sums || seen.iter().any(|&seen| seen != Seen::Never)))
        || (is_written && !has_sums)
    {
        return Err(refuse("it holds sums or a weight that no micro-batch can have added"));
    }
    Ok(())
}

pub(crate) fn refuse(reason: impl Into<String>) -> Error {
    Error::State { reason: reason.into() }
}

impl Seen {
    /// All of them, as they are numbered.
    pub const ALL: [Self; 3] = [Self::Never, Self::Masked, Self::Written];

    /// What a state calls it: "never", "masked" or "written".
    pub fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Masked => "masked",
            Self::Written => "written",
        }
    }

    /// The one that a state calls so.
    ///
    /// # Errors
    /// [`Error::State`] if there is none.
    pub fn from_name(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|seen| seen.name() == name);
        found.ok_or_else(|| refuse(format!("expected never, masked or written, got {name}")))
    }
}
