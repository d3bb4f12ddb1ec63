//! States as Python has them: a dict of NumPy arrays and plain values.

use gradacc::{Counters, DType, Error, Goal, Gradient, ParamState, Schedule, Seen, State, TensorError};
use pyo3::exceptions::{PyException, PyMemoryError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::errors;
use crate::gradients::Memory;

/// The version of the dict's layout. A later one is refused.
const VERSION: u64 = 1;

/// More than any library of tensors has.
const MOST_DIMENSIONS: usize = 1024;

/// A dict of a state: `ids` are those of its parameters, in its order. Its arrays have memory of their own.
pub(crate) fn to_dict<'py>(
    py: Python<'py>,
    state: State<Gradient>,
    ids: &[Bound<'py, PyAny>],
) -> PyResult<Bound<'py, PyDict>> {
    let Counters { goal, count, weight, rejected, has_sums } = state.counters;
    let (every, until_weight) = match goal {
        Some(Goal::Count(every)) => (Some(every.get()), None),
        Some(Goal::Weight(weight)) => (None, Some(weight)),
        Some(Goal::Open) | None => (None, None),
    };
    let params = PyDict::new(py);
    for (id, param) in ids.iter().zip(state.params) {
        let entry = PyDict::new(py);
        entry.set_item("shape", PyTuple::new(py, &param.shape)?)?;
        entry.set_item("dtype", param.dtype.name())?;
        entry.set_item("seen", param.seen.name())?;
        entry.set_item("sums", param.sums.map(|sums| Memory::new(sums).plain_array(py)).transpose()?)?;
        params.set_item(id, entry)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("version", VERSION)?;
    dict.set_item("window", state.window)?;
    dict.set_item("every", every)?;
    dict.set_item("until_weight", until_weight)?;
    dict.set_item("count", count)?;
    dict.set_item("weight", weight)?;
    dict.set_item("rejected", rejected)?;
    dict.set_item("has_sums", has_sums)?;
    dict.set_item("params", params)?;
    Ok(dict)
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Fields<'py> {
    version: u64,
    window: u64,
    every: Option<u64>,
    until_weight: Option<f64>,
    count: u64,
    weight: f64,
    rejected: u64,
    has_sums: bool,
    params: Bound<'py, PyDict>,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Param<'py> {
    shape: Bound<'py, PyAny>,
    dtype: String,
    seen: String,
    sums: Option<Bound<'py, PyAny>>,
}

/// The state of a dict, with bytes of its own.
pub(crate) fn from_dict(dict: &Bound<'_, PyAny>) -> PyResult<State<Vec<u8>>> {
    let py = dict.py();
    let fields: Fields<'_> = dict.extract().map_err(|cause| no_state(py, "", cause))?;
    if fields.version != VERSION {
        return Err(refuse(py, format!("expected version {VERSION} of the layout, got {}", fields.version)));
    }
    let goal = match (fields.every, fields.until_weight) {
        _ if fields.count == 0 && fields.rejected == 0 => Ok(None),
        (None, None) => Ok(Some(Schedule::Open)),
        (Some(every), None) => Schedule::every(every).map(Some),
        (None, Some(weight)) => Schedule::until_weight(weight).map(Some),
        (Some(_), Some(_)) => {
            return Err(refuse(py, "it has both a length and a weight that completes the window"));
        }
    };
    let goal = match goal.map_err(|error| refuse(py, error.to_string()))? {
        Some(Schedule::Every(every)) => Some(Goal::Count(every)),
        Some(Schedule::UntilWeight(weight)) => Some(Goal::Weight(weight)),
        Some(_) => Some(Goal::Open),
        None => None,
    };
    let Fields { window, count, weight, rejected, has_sums, .. } = fields;
    let params = fields.params.iter().map(|(id, entry)| param(&id, &entry)).collect::<PyResult<_>>()?;
    Ok(State { window, counters: Counters { goal, count, weight, rejected, has_sums }, params })
}

fn param(id: &Bound<'_, PyAny>, entry: &Bound<'_, PyAny>) -> PyResult<ParamState<Vec<u8>>> {
    let (py, name) = (id.py(), errors::name(id));
    let no_state = |cause| no_state(py, &format!("parameter {name}: "), cause);
    let Param { shape, dtype, seen, sums } = entry.extract().map_err(no_state)?;
    // Whatever length it claims to have.
    let sizes = shape.try_iter().map_err(no_state)?.take(MOST_DIMENSIONS + 1);
    let shape: Vec<usize> = sizes.map(|size| size?.extract()).collect::<PyResult<_>>().map_err(no_state)?;
    if shape.len() > MOST_DIMENSIONS {
        return Err(refuse(py, format!("parameter {name}: expected a shape of {MOST_DIMENSIONS} dimensions at most")));
    }
    let dtype: DType = dtype.parse().map_err(|reason: TensorError| refuse(py, reason.of(&name).to_string()))?;
    let sums = sums.map(|sums| bytes_of(&sums, &shape, dtype)).transpose().map_err(no_state)?;
    let seen = Seen::from_name(&seen).map_err(|error| errors::raise(py, error))?;
    Ok(ParamState { name, shape: shape.into(), dtype, seen, sums })
}

fn bytes_of(sums: &Bound<'_, PyAny>, shape: &[usize], dtype: DType) -> PyResult<Vec<u8>> {
    let py = sums.py();
    let array = py.import(intern!(py, "numpy"))?.call_method1(intern!(py, "asarray"), (sums,))?;
    let got: (Vec<usize>, String) =
        (array.getattr(intern!(py, "shape"))?.extract()?, dtype_of(&array)?.getattr(intern!(py, "name"))?.extract()?);
    let expected = if dtype == DType::BF16 { "uint16" } else { dtype.name() };
    if got.0 != shape || (got.1 != expected && got.1 != dtype.name()) {
        let message = format!("expected a {expected} array of shape {shape:?}, got {} of {:?}", got.1, got.0);
        return Err(pyo3::exceptions::PyValueError::new_err(message));
    }
    let native = dtype_of(&array)?.call_method1(intern!(py, "newbyteorder"), ("=",))?;
    let array = array.call_method1(intern!(py, "astype"), (native,))?;
    let bytes = array.call_method0(intern!(py, "tobytes"))?;
    Ok(bytes.cast::<PyBytes>()?.as_bytes().to_vec())
}

fn dtype_of<'py>(array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    array.getattr(intern!(array.py(), "dtype"))
}

fn refuse(py: Python<'_>, reason: impl Into<String>) -> PyErr {
    errors::raise(py, Error::State { reason: reason.into() })
}

fn no_state(py: Python<'_>, of: &str, cause: PyErr) -> PyErr {
    if !cause.is_instance_of::<PyException>(py) || cause.is_instance_of::<PyMemoryError>(py) {
        return cause;
    }
    let error = refuse(py, format!("{of}this is no state_dict of gradacc: {cause}"));
    error.set_cause(py, Some(cause));
    error
}
