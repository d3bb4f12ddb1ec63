//! Arguments of the accumulator's methods, as Python gives them.

use gradacc::{DType, Error, ParamId, ParamSpec, TensorError, Weight};
use pyo3::prelude::*;

use crate::errors;

/// A weight and a scale as tensors of a device.
pub(crate) type Late = (Option<Py<PyAny>>, Option<Py<PyAny>>);

/// Of either.
pub(crate) fn clone_late(tensor: &Option<Py<PyAny>>) -> Option<Py<PyAny>> {
    Python::attach(|py| tensor.as_ref().map(|tensor| tensor.clone_ref(py)))
}

/// Weight and scale, in range.
pub(crate) fn to_weight(weight: &Bound<'_, PyAny>, scale: Option<&Bound<'_, PyAny>>) -> PyResult<Weight> {
    let py = weight.py();
    let (weight, scale) = (weight.extract()?, scale.map(|scale| scale.extract()).transpose()?);
    let weight = Weight::new(weight).and_then(|weight| scale.map_or(Ok(weight), |scale| weight.with_scale(scale)));
    weight.map_err(|error| errors::raise(py, error))
}

/// A parameter's shape and dtype, by the dtype's name.
pub(crate) fn spec(id: u64, name: String, shape: Vec<usize>, dtype: &str) -> Result<ParamSpec, Error> {
    let dtype: DType = dtype.parse().map_err(|reason: TensorError| reason.of(&name))?;
    Ok(ParamSpec { id: ParamId(id), name, shape: shape.into(), dtype })
}

/// One of a few options by its name.
pub(crate) fn choose<T: Copy>(name: &'static str, options: &[(&str, T)], given: &str) -> Result<T, Error> {
    options.iter().find(|(option, _)| *option == given).map(|&(_, value)| value).ok_or_else(|| {
        let known: Vec<_> = options.iter().map(|(option, _)| format!("{option:?}")).collect();
        Error::Argument { name, reason: format!("expected {}, got {given:?}", known.join(" or ")) }
    })
}
