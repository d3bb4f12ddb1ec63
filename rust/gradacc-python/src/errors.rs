//! Exception classes, and which one an error of the engine becomes.

use gradacc::{Error, TensorError};
use pyo3::exceptions::{
    PyArithmeticError, PyException, PyKeyError, PyMemoryError, PyOSError, PyRuntimeError, PyTypeError, PyValueError,
};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};

struct Classes {
    base: Py<PyType>,
    argument: Py<PyType>,
    shape: Py<PyType>,
    dtype: Py<PyType>,
    unknown_parameter: Py<PyType>,
    window: Py<PyType>,
    nonfinite: Py<PyType>,
    state: Py<PyType>,
}

impl Classes {
    fn get(py: Python<'_>) -> PyResult<&Self> {
        static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();
        CLASSES.get_or_try_init(py, || Self::new(py))
    }

    fn new(py: Python<'_>) -> PyResult<Self> {
        let class = |name: &str, doc: &str, bases: &[&Bound<'_, PyType>]| -> PyResult<Py<PyType>> {
            let attributes = PyDict::new(py);
            attributes.set_item("__module__", "gradacc")?;
            attributes.set_item("__doc__", doc)?;
            // KeyError's own would print a message as if it were a key.
            attributes.set_item("__str__", py.get_type::<PyException>().getattr("__str__")?)?;
            let class = py.get_type::<PyType>().call1((name, PyTuple::new(py, bases)?, attributes))?;
            Ok(class.cast_into::<PyType>()?.unbind())
        };
        let base = class(
            "GradaccError",
            "What gradacc refuses. A refused call has changed nothing, unless it says otherwise.",
            &[&py.get_type::<PyException>()],
        )?;
        // Each is the matching builtin too.
        let also = |name, doc, builtin: Bound<'_, PyType>| class(name, doc, &[base.bind(py), &builtin]);
        Ok(Self {
            argument: also("ArgumentError", "An argument is out of its range.", py.get_type::<PyValueError>())?,
            shape: also("ShapeError", "A gradient has not its parameter's shape.", py.get_type::<PyValueError>())?,
            dtype: also(
                "DtypeError",
                "A gradient is no tensor, or of a dtype that its buffer does not take.",
                py.get_type::<PyTypeError>(),
            )?,
            unknown_parameter: also(
                "UnknownParameterError",
                "No parameter of this id has been registered.",
                py.get_type::<PyKeyError>(),
            )?,
            window: also(
                "WindowError",
                "The call does not fit the state of the window.",
                py.get_type::<PyRuntimeError>(),
            )?,
            nonfinite: also(
                "NonFiniteError",
                "A gradient holds NaN or infinity, and on_nonfinite is \"raise\".",
                py.get_type::<PyArithmeticError>(),
            )?,
            state: also("StateError", "A state can't be loaded into this accumulator.", py.get_type::<PyValueError>())?,
            base,
        })
    }
}

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let classes = Classes::get(py)?;
    for class in [
        &classes.base,
        &classes.argument,
        &classes.shape,
        &classes.dtype,
        &classes.unknown_parameter,
        &classes.window,
        &classes.nonfinite,
        &classes.state,
    ] {
        let class = class.bind(py);
        module.add(class.name()?, class)?;
    }
    Ok(())
}

/// The exception that an error of the engine becomes.
pub(crate) fn raise(py: Python<'_>, error: Error) -> PyErr {
    let classes = match Classes::get(py) {
        Ok(classes) => classes,
        Err(failure) => return failure,
    };
    let class = match &error {
        Error::Tensor { reason: TensorError::Shape { .. }, .. } => &classes.shape,
        Error::Tensor { reason: TensorError::Dtype { .. }, .. } => &classes.dtype,
        Error::UnknownParameter { .. } => &classes.unknown_parameter,
        Error::Window(_) => &classes.window,
        Error::NonFinite { .. } => &classes.nonfinite,
        Error::Argument { .. } => &classes.argument,
        Error::State { .. } => &classes.state,
        Error::File { path, code, reason, .. } => {
            let Some(code) = code else { return PyOSError::new_err(error.to_string()) };
            // Python makes the class that goes with the number; it adds the path, and the number, to the message.
            let reason = reason.split(" (os error").next().unwrap_or(reason).to_owned();
            return PyOSError::new_err((*code, reason, path.clone().into_os_string()));
        }
        Error::Memory { .. } => return PyMemoryError::new_err(error.to_string()),
        _ => &classes.base,
    };
    PyErr::from_type(class.bind(py).clone(), error.to_string())
}

/// A `GradaccError` about one parameter, and the exception it stems from.
pub(crate) fn refuse(py: Python<'_>, parameter: &str, reason: &str, cause: Option<PyErr>) -> PyErr {
    let classes = match Classes::get(py) {
        Ok(classes) => classes,
        Err(failure) => return failure,
    };
    let error = PyErr::from_type(classes.base.bind(py).clone(), format!("parameter {parameter}: {reason}"));
    error.set_cause(py, cause);
    error
}

/// What messages and states call an id: a string by itself, an int 7 `#7`, and a string that starts so `##...`. No two
/// ids have one name.
pub(crate) fn name(id: &Bound<'_, PyAny>) -> String {
    let text = id.str().map_or_else(|_| "?".into(), |name| name.to_string_lossy().into_owned());
    if !id.is_instance_of::<PyString>() || text.starts_with('#') { format!("#{text}") } else { text }
}

/// The name of an object's type, for messages.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    let name = object.get_type().getattr(intern!(object.py(), "__qualname__"));
    name.map_or_else(|_| "?".into(), |name| name.to_string())
}
