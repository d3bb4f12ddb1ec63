//! `_core.Lengths`.

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
