//! How long windows are, as Python gives it; `_core.Lengths`.

use gradacc::{Error, Schedule};
use pyo3::prelude::*;

use crate::errors;

/// Lengths that hold from a position on.
#[pyclass(frozen, module = "gradacc._core")]
pub(crate) struct Lengths(gradacc::Lengths);

#[pymethods]
impl Lengths {
    #[new]
    fn new(py: Python<'_>, lengths: Vec<(u64, u64)>) -> PyResult<Self> {
        gradacc::Lengths::new(lengths).map(Self).map_err(|error| errors::raise(py, error))
    }

    fn at(&self, position: u64) -> u64 {
        self.0.at(position).get()
    }
}

/// What completes a window, as Python gives it: a length, pairs of a window and the length from it on, or a function
/// from the number of a window to its length.
#[derive(FromPyObject)]
pub(crate) enum Every<'py> {
    Always(u64),
    FromWindow(Vec<(u64, u64)>),
    Told(Bound<'py, PyAny>),
}

impl Every<'_> {
    /// How the engine is told.
    pub(crate) fn schedule(every: Option<&Self>, until_weight: Option<f64>) -> Result<Schedule, Error> {
        match (every, until_weight) {
            (None, None) => Ok(Schedule::Open),
            (None, Some(weight)) => Schedule::until_weight(weight),
            (Some(_), Some(_)) => {
                Err(Error::Argument { name: "every", reason: "expected it or until_weight, got both".into() })
            }
            (Some(Self::Always(length)), None) => Schedule::every(*length),
            (Some(Self::FromWindow(lengths)), None) => {
                gradacc::Lengths::new(lengths.iter().copied()).map(Schedule::FromWindow)
            }
            (Some(Self::Told(_)), None) => Ok(Schedule::Told),
        }
    }

    /// The function, if it is one.
    pub(crate) fn function(every: Option<Self>) -> Option<Py<PyAny>> {
        match every {
            Some(Self::Told(function)) => Some(function.unbind()),
            _ => None,
        }
    }
}
