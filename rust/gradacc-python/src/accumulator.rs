//! `_core.Accumulator`.

use std::sync::{Mutex, PoisonError};

use gradacc::{Error, GradientAccumulator, OnMissing, OnNonFinite, Reduction, Store, Weight};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMapping, PyTuple};

use crate::errors;
use crate::gradients::Gradients;
use crate::source::{self, Source};

/// The engine's accumulator, and the ids that Python knows its parameters by.
///
/// One lock. It is never held while Python code runs, and waited for only without the GIL.
#[pyclass(frozen, module = "gradacc._core")]
pub(crate) struct Accumulator {
    engine: Mutex<GradientAccumulator>,
    /// In layout order.
    ids: Py<PyList>,
    /// From id to number in the layout.
    numbers: Py<PyDict>,
}

/// What is known of the last micro-batch: `finite`, and `norm` if `micro_norms` asked for it.
#[pyclass(frozen, get_all, module = "gradacc._core")]
pub(crate) struct Last {
    finite: bool,
    norm: Option<f64>,
}

#[pymethods]
impl Last {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (finite, norm) = (self.finite.into_pyobject(py)?.repr()?, self.norm.into_pyobject(py)?.repr()?);
        Ok(format!("Last(finite={finite}, norm={norm})"))
    }
}

fn choose<T: Copy>(name: &'static str, options: &[(&str, T)], given: &str) -> Result<T, Error> {
    options.iter().find(|(option, _)| *option == given).map(|&(_, value)| value).ok_or_else(|| {
        let known: Vec<_> = options.iter().map(|(option, _)| format!("{option:?}")).collect();
        Error::Argument { name, reason: format!("expected {}, got {given:?}", known.join(" or ")) }
    })
}

#[pymethods]
impl Accumulator {
    #[new]
    #[pyo3(signature = (params, *, every, reduction, dtype, on_nonfinite, on_missing, micro_norms))]
    #[expect(clippy::too_many_arguments, reason = "one for each of the public constructor's")]
    fn new(
        py: Python<'_>,
        params: Vec<(Bound<'_, PyAny>, Vec<usize>, String)>,
        every: Option<u64>,
        reduction: &str,
        dtype: Option<&str>,
        on_nonfinite: &str,
        on_missing: &str,
        micro_norms: bool,
    ) -> PyResult<Self> {
        let build = || {
            let mut builder = GradientAccumulator::builder()
                .reduction(choose("reduction", &[("mean", Reduction::Mean), ("sum", Reduction::Sum)], reduction)?)
                .on_nonfinite(choose(
                    "on_nonfinite",
                    &[
                        ("propagate", OnNonFinite::Propagate),
                        ("raise", OnNonFinite::Raise),
                        ("skip", OnNonFinite::Skip),
                    ],
                    on_nonfinite,
                )?)
                .on_missing(choose(
                    "on_missing",
                    &[("ignore", OnMissing::Ignore), ("error", OnMissing::Error)],
                    on_missing,
                )?)
                .micro_norms(micro_norms);
            if let Some(every) = every {
                builder = builder.every(every);
            }
            if let Some(dtype) = dtype {
                let reason =
                    |reason: gradacc::TensorError| Error::Argument { name: "dtype", reason: reason.to_string() };
                builder = builder.dtype(dtype.parse().map_err(reason)?);
            }
            builder.build()
        };
        let accumulator = Self {
            engine: Mutex::new(build().map_err(|error| errors::raise(py, error))?),
            ids: PyList::empty(py).unbind(),
            numbers: PyDict::new(py).unbind(),
        };
        for (id, shape, dtype) in params {
            accumulator.register(py, &id, shape, &dtype)?;
        }
        Ok(accumulator)
    }

    fn register(&self, py: Python<'_>, id: &Bound<'_, PyAny>, shape: Vec<usize>, dtype: &str) -> PyResult<()> {
        let (ids, numbers) = (self.ids.bind(py), self.numbers.bind(py));
        if numbers.contains(id)? {
            return Err(errors::raise(py, Error::DuplicateParameter { parameter: errors::name(id) }));
        }
        let name = errors::name(id);
        let number = self.locked(py, |engine| {
            let number = engine.store().layout().len();
            engine.register(source::spec(number as u64, name, shape, dtype)?)
        })?;
        ids.append(id)?;
        numbers.set_item(id, number)
    }

    #[pyo3(signature = (grads, weight, scale))]
    fn add(
        &self,
        py: Python<'_>,
        grads: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        scale: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let weight = self.weight(py, weight, scale)?;
        let sources = self.sources(grads)?;
        let batch =
            sources.iter().map(|(number, source)| Ok((*number, source.view().map_err(|reason| (*number, reason))?)));
        let batch = batch.collect::<Result<Vec<_>, _>>().map_err(|(number, reason)| {
            let id = self.ids.bind(py).get_item(number);
            id.map_or_else(|error| error, |id| errors::raise(py, gradacc::TensorError::of(reason, errors::name(&id))))
        })?;
        Ok(self.locked(py, |engine| engine.add_batch(batch, weight))?.is_complete())
    }

    fn take(&self, py: Python<'_>) -> PyResult<Gradients> {
        let gradients = self.locked(py, GradientAccumulator::take)?;
        Gradients::new(gradients, self.ids.bind(py))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.locked(py, |engine| {
            engine.reset();
            Ok(())
        })
    }

    #[getter]
    fn ids(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.ids.bind(py).get_slice(0, usize::MAX).into_any().unbind())
    }

    #[getter]
    fn count(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.count()))
    }

    #[getter]
    #[pyo3(name = "weight")]
    fn weight_so_far(&self, py: Python<'_>) -> PyResult<f64> {
        self.locked(py, |engine| Ok(engine.weight()))
    }

    #[getter]
    fn rejected(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.rejected()))
    }

    #[getter]
    fn complete(&self, py: Python<'_>) -> PyResult<bool> {
        self.locked(py, |engine| Ok(engine.is_complete()))
    }

    #[getter]
    fn window(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.window()))
    }

    #[getter]
    fn every(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.locked(py, |engine| Ok(engine.every()))
    }

    #[getter]
    fn last(&self, py: Python<'_>) -> PyResult<Option<Last>> {
        let last = self.locked(py, |engine| Ok(engine.last()))?;
        Ok(last.map(|last| Last { finite: last.finite, norm: last.norm }))
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.locked(py, |engine| Ok(engine.store().layout().len_bytes()))
    }

    #[getter]
    fn mapped_buffers(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.store().mapped_buffers()))
    }
}

impl Accumulator {
    /// Runs the engine with its lock held and without the GIL.
    fn locked<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut GradientAccumulator) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let result = py.detach(|| {
            // After a panic, a bug of the engine, the window is what it was left as.
            work(&mut self.engine.lock().unwrap_or_else(PoisonError::into_inner))
        });
        result.map_err(|error| errors::raise(py, error))
    }

    fn weight(&self, py: Python<'_>, weight: &Bound<'_, PyAny>, scale: Option<&Bound<'_, PyAny>>) -> PyResult<Weight> {
        let (weight, scale) = (weight.extract()?, scale.map(|scale| scale.extract()).transpose()?);
        let weight = Weight::new(weight).and_then(|weight| scale.map_or(Ok(weight), |scale| weight.with_scale(scale)));
        weight.map_err(|error| errors::raise(py, error))
    }

    /// The gradients that a mapping or a sequence in layout order holds, by number.
    fn sources(&self, grads: &Bound<'_, PyAny>) -> PyResult<Vec<(usize, Source)>> {
        let py = grads.py();
        if let Ok(mapping) = grads.cast_exact::<PyDict>() {
            let mut sources = Vec::with_capacity(mapping.len());
            for (id, gradient) in mapping {
                self.push(&mut sources, &id, &gradient)?;
            }
            return Ok(sources);
        }
        if grads.is_instance_of::<PyList>() || grads.is_instance_of::<PyTuple>() {
            let ids = self.ids.bind(py);
            let (expected, got) = (ids.len(), grads.len()?);
            if expected != got {
                return Err(errors::raise(py, Error::SequenceLength { expected, got }));
            }
            let mut sources = Vec::with_capacity(got);
            for (number, gradient) in grads.try_iter()?.enumerate() {
                let gradient = gradient?;
                if !gradient.is_none() {
                    sources.push((number, Source::new(&gradient, &ids.get_item(number)?)?));
                }
            }
            return Ok(sources);
        }
        if grads.cast::<PyMapping>().is_ok() {
            let mut sources = Vec::with_capacity(grads.len()?);
            for item in grads.call_method0(intern!(py, "items"))?.try_iter()? {
                let (id, gradient): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
                self.push(&mut sources, &id, &gradient)?;
            }
            return Ok(sources);
        }
        Err(PyTypeError::new_err(format!(
            "grads: expected a mapping from id to gradient, a list or tuple of gradients in layout order, or a module, got {}",
            errors::type_name(grads)
        )))
    }

    fn push(
        &self,
        sources: &mut Vec<(usize, Source)>,
        id: &Bound<'_, PyAny>,
        gradient: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let py = id.py();
        match self.numbers.bind(py).get_item(id)? {
            None => Err(errors::raise(py, Error::UnknownParameter { parameter: errors::name(id) })),
            Some(_) if gradient.is_none() => Ok(()),
            Some(number) => {
                sources.push((number.extract()?, Source::new(gradient, id)?));
                Ok(())
            }
        }
    }
}
