//! `gradacc._core`: the engine as Python sees it. Translates, and decides nothing.

// Unsafe code lives in `capsule`, `numpy`, `source` and `vetting`; SAFETY.md says what it rests on.
#[deny(unsafe_code)]
mod accumulator;
#[deny(unsafe_code)]
mod arguments;
#[deny(unsafe_code)]
mod batch;
mod capsule;
#[deny(unsafe_code)]
mod engine;
#[deny(unsafe_code)]
mod errors;
#[deny(unsafe_code)]
mod gradients;
mod numpy;
#[deny(unsafe_code)]
mod schedule;
mod source;
#[deny(unsafe_code)]
mod sparse;
#[deny(unsafe_code)]
mod state;
#[deny(unsafe_code)]
mod store;
mod vetting;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _core {
    use super::*;

    #[pymodule_export]
    use crate::accumulator::{Accumulator, Last};
    #[pymodule_export]
    use crate::gradients::{Gradient, Gradients, Memory};
    #[pymodule_export]
    use crate::schedule::Lengths;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        errors::add_to(module)
    }

    #[pyfunction]
    fn simd_level(py: Python<'_>) -> PyResult<&'static str> {
        Ok(gradacc::simd_level().map_err(|error| errors::raise(py, error))?.name())
    }

    #[pyfunction]
    fn num_threads(py: Python<'_>) -> PyResult<usize> {
        gradacc::num_threads().map_err(|error| errors::raise(py, error))
    }

    #[pyfunction]
    fn set_num_threads(py: Python<'_>, threads: usize) -> PyResult<()> {
        gradacc::set_num_threads(threads).map_err(|error| errors::raise(py, error))
    }
}
