//! `_core.Accumulator`.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use gradacc::{
    Counters, Error, Goal, Gradient, OnMissing, OnNonFinite, Reduction, Seen, Share, Store, TensorError, WindowError,
};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{Late, choose, clone_late, spec, to_weight};
use crate::batch::Ids;
use crate::engine::{Engine, Shared};
use crate::errors;
use crate::gradients::Gradients;
use crate::schedule::Every;
use crate::source::Backend;
use crate::state;
use crate::store::DeviceStore;

/// The engine's accumulator, and the ids that Python knows its parameters by.
#[pyclass(frozen, module = "gradacc._core")]
pub(crate) struct Accumulator {
    engine: Shared,
    ids: Ids,
    /// Held while a parameter is registered here and in the engine, so that both number it alike.
    registering: Mutex<()>,
    /// From the number of a window to its length, where the schedule is a function.
    length_of: Mutex<Option<Py<PyAny>>>,
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

#[pymethods]
impl Accumulator {
    #[new]
    #[pyo3(signature = (
        params, *, every, until_weight, reduction, dtype, on_nonfinite, on_missing, micro_norms, backend, device
    ))]
    #[expect(clippy::too_many_arguments, reason = "one for each of the public constructor's")]
    fn new(
        py: Python<'_>,
        params: Vec<(Bound<'_, PyAny>, Vec<usize>, String, String)>,
        every: Option<Every<'_>>,
        until_weight: Option<f64>,
        reduction: &str,
        dtype: Option<&str>,
        on_nonfinite: &str,
        on_missing: &str,
        micro_norms: bool,
        backend: &str,
        device: Option<&str>,
    ) -> PyResult<Self> {
        let build = || {
            let backends = [("auto", Backend::Auto), ("engine", Backend::Engine), ("torch", Backend::Torch)];
            let backend = match (choose("backend", &backends, backend)?, device) {
                (backend, None) => backend,
                (Backend::Torch, Some(_)) => {
                    let reason = "expected None where torch keeps the sums, on the device of the gradients";
                    return Err(Error::Argument { name: "device", reason: reason.into() });
                }
                (_, Some(device)) => choose("device", &[("cpu", Backend::Host)], device)?,
            };
            let mut builder = gradacc::GradientAccumulator::builder()
                .schedule(Every::schedule(every.as_ref(), until_weight)?)
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
            if let Some(dtype) = dtype {
                let reason = |reason: TensorError| Error::Argument { name: "dtype", reason: reason.to_string() };
                builder = builder.dtype(dtype.parse().map_err(reason)?);
            }
            let (all_torch, examines) = (backend == Backend::Torch, on_nonfinite == "raise");
            let engine = builder.build_with(|dtype| DeviceStore::new(dtype, all_torch, examines))?;
            Ok((engine, backend))
        };
        let (engine, backend) = build().map_err(|error| errors::raise(py, error))?;
        let accumulator = Self {
            engine: Shared::new(engine),
            ids: Ids::new(py, backend),
            registering: Mutex::default(),
            length_of: Mutex::new(Every::function(every)),
        };
        for (id, shape, dtype, device) in params {
            accumulator.register(py, &id, shape, &dtype, &device)?;
        }
        Ok(accumulator)
    }

    /// `device` is where its gradients are expected: its buffer is made for those that are alike.
    fn register(
        &self,
        py: Python<'_>,
        id: &Bound<'_, PyAny>,
        shape: Vec<usize>,
        dtype: &str,
        device: &str,
    ) -> PyResult<()> {
        let (ids, numbers) = (self.ids.list.bind(py), self.ids.numbers.bind(py));
        let _registering = self.registering.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        if numbers.contains(id)? {
            return Err(errors::raise(py, Error::DuplicateParameter { parameter: errors::name(id) }));
        }
        let name = errors::name(id);
        let number = self.locked(py, |engine| {
            let number = engine.store().layout().len();
            if !self.ids.is_for_host() {
                engine.store().expect_next(device);
            }
            engine.register(spec(number as u64, name, shape, dtype)?)
        })?;
        ids.append(id)?;
        numbers.set_item(id, number)
    }

    /// Completes windows otherwise from now on; one that is open keeps its length.
    #[pyo3(signature = (*, every, until_weight))]
    fn set_schedule(&self, py: Python<'_>, every: Option<Every<'_>>, until_weight: Option<f64>) -> PyResult<()> {
        let schedule = Every::schedule(every.as_ref(), until_weight).map_err(|error| errors::raise(py, error))?;
        let mut length_of = self.length_of.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *length_of, Every::function(every));
        self.locked(py, |engine| {
            engine.set_schedule(schedule);
            Ok(())
        })?;
        drop(length_of);
        // Python code may run now.
        drop(before);
        Ok(())
    }

    /// `fresh` refuses gradients in memory that an earlier window handed over.
    /// `late` is a weight and a scale as tensors of a device, to be used in place of the others.
    #[pyo3(signature = (grads, weight, scale, *, fresh=false, late=None))]
    fn add(
        &self,
        grads: &Bound<'_, PyAny>,
        weight: &Bound<'_, PyAny>,
        scale: Option<&Bound<'_, PyAny>>,
        fresh: bool,
        late: Option<Late>,
    ) -> PyResult<bool> {
        let py = grads.py();
        let weight = to_weight(weight, scale)?;
        self.ids.with_tensors(grads, |tensors, len_bytes| {
            let add = |engine: &mut Engine| {
                if fresh {
                    engine.check_fresh(tensors)?;
                }
                let Some((late_weight, late_scale)) = &late else {
                    let added = engine.add_batch(tensors, weight)?;
                    engine.store().keep_report()?;
                    return Ok(added);
                };
                let store = engine.store();
                store.set_late_scale(clone_late(late_scale));
                let added = engine.add_batch(tensors, weight);
                let store = engine.store();
                store.set_late_scale(None);
                let added = added?;
                if let Some(late_weight) = clone_late(late_weight).filter(|_| !added.is_skipped()) {
                    store.push_late_weight(late_weight);
                }
                store.keep_report()?;
                Ok(added)
            };
            self.opening(py, len_bytes, add).map(|added| added.is_complete())
        })
    }

    fn check_parts(&self, py: Python<'_>) -> PyResult<()> {
        self.locked(py, |engine| engine.check_parts())
    }

    /// Returns its number, for `end_micro_batch` and `abandon_micro_batch`.
    #[pyo3(signature = (weight, scale, *, late=None))]
    fn begin_micro_batch(
        &self,
        weight: &Bound<'_, PyAny>,
        scale: Option<&Bound<'_, PyAny>>,
        late: Option<Late>,
    ) -> PyResult<Option<u64>> {
        let py = weight.py();
        let weight = to_weight(weight, scale)?;
        self.opening(py, 0, |engine| {
            engine.begin_micro_batch(weight)?;
            if let Some((_, late_scale)) = &late {
                engine.store().set_late_scale(clone_late(late_scale));
            }
            Ok(engine.open_micro_batch())
        })
    }

    fn add_part(&self, grads: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = grads.py();
        self.ids.with_tensors(grads, |tensors, len_bytes| {
            self.engine.run(py, len_bytes, |engine| engine.add_part_batch(tensors))
        })
    }

    #[pyo3(signature = (number, *, late=None))]
    fn end_micro_batch(&self, py: Python<'_>, number: u64, late: Option<Late>) -> PyResult<bool> {
        self.locked(py, |engine| {
            if engine.open_micro_batch() != Some(number) {
                return Err(WindowError::NoMicroBatch.into());
            }
            let added = engine.end_micro_batch();
            engine.store().set_late_scale(None);
            let added = added?;
            if let Some((Some(late_weight), _)) = late {
                engine.store().push_late_weight(late_weight);
            }
            engine.store().keep_report()?;
            Ok(added.is_complete())
        })
    }

    /// Does nothing if it is not open any more.
    fn abandon_micro_batch(&self, py: Python<'_>, number: u64) -> PyResult<()> {
        self.locked(py, |engine| {
            if engine.open_micro_batch() == Some(number) {
                engine.abandon_micro_batch();
                engine.store().set_late_scale(None);
            }
            Ok(())
        })
    }

    fn take(&self, py: Python<'_>) -> PyResult<Gradients> {
        let taken = self.weighed(py, Engine::take)?;
        Gradients::new(taken, self.ids.list.bind(py))
    }

    /// What this window adds to one that is spread over several processes: count, weight, how many were rejected, whether
    /// there are sums, and for each parameter how it was seen.
    fn share<'py>(&self, py: Python<'py>) -> PyResult<(u64, f64, u64, bool, Bound<'py, PyBytes>)> {
        let Share { counters, seen } = self.weighed(py, |engine| engine.share())?;
        let Counters { count, weight, rejected, has_sums, .. } = counters;
        let seen: Vec<u8> = seen.into_iter().map(|seen| seen as u8).collect();
        Ok((count, weight, rejected, has_sums, PyBytes::new(py, &seen)))
    }

    fn take_shared(&self, py: Python<'_>, shares: Vec<(u64, f64, u64, bool, Vec<u8>)>) -> PyResult<Gradients> {
        let shares = shares.into_iter().map(|(count, weight, rejected, has_sums, seen)| {
            let seen = seen.into_iter().map(|seen| Seen::ALL[usize::from(seen).min(2)]).collect();
            Share { counters: Counters { goal: None, count, weight, rejected, has_sums }, seen }
        });
        let shares: Vec<_> = shares.collect();
        let taken = self.locked(py, |engine| engine.take_shared(&shares))?;
        Gradients::new(taken, self.ids.list.bind(py))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.locked(py, |engine| {
            engine.reset();
            Ok(())
        })
    }

    /// What this window holds, in memory of its own.
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // So that there are as many ids as parameters.
        let _registering = self.registering.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        let state = self.weighed(py, |engine| {
            engine.state()?.try_map(|param, sums| Gradient::copy_of(sums.as_ref(), param.dtype, &param.shape))
        })?;
        let ids: Vec<_> = self.ids.list.bind(py).iter().collect();
        state::to_dict(py, state, &ids)
    }

    fn load_state(&self, dict: &Bound<'_, PyAny>) -> PyResult<()> {
        let state = state::from_dict(dict)?;
        self.locked(dict.py(), |engine| engine.load_state(&state))
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.weighed(py, |engine| engine.save(path))
    }

    fn load(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.locked(py, |engine| engine.load(path))
    }

    /// Shape, dtype of sums, and place in the flat buffers of each parameter.
    fn layout(&self, py: Python<'_>) -> PyResult<Vec<Param>> {
        self.locked(py, |engine| {
            let layout = engine.store().layout();
            let param = |param| {
                let slot = layout.slot(param);
                (layout.spec(param).shape.to_vec(), layout.sums_dtype(param).name(), slot.buffer, slot.offset)
            };
            Ok((0..layout.len()).map(param).collect())
        })
    }

    /// Whether torch keeps any sums.
    fn has_torch(&self, py: Python<'_>) -> PyResult<bool> {
        self.locked(py, |engine| Ok(engine.store().has_torch()))
    }

    #[getter]
    fn ids(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.ids.list.bind(py).get_slice(0, usize::MAX).into_any().unbind())
    }

    #[getter]
    fn count(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.count()))
    }

    #[getter]
    #[pyo3(name = "weight")]
    fn weight_so_far(&self, py: Python<'_>) -> PyResult<f64> {
        self.weighed(py, |engine| Ok(engine.weight()))
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

    /// The length of this window, as it is fixed or would be.
    #[getter]
    fn every(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let (window, goal) = self.locked(py, |engine| Ok((engine.window(), engine.goal())))?;
        match goal {
            None => self.length(py, window),
            Some(Goal::Count(length)) => Ok(Some(length.get())),
            Some(_) => Ok(None),
        }
    }

    #[getter]
    fn until_weight(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        match self.locked(py, |engine| Ok(engine.goal()))? {
            Some(Goal::Weight(weight)) => Ok(Some(weight)),
            _ => Ok(None),
        }
    }

    #[getter]
    fn last(&self, py: Python<'_>) -> PyResult<Option<Last>> {
        self.locked(py, |engine| {
            let Some(last) = engine.last() else { return Ok(None) };
            let (finite, sum_of_squares) = engine.store().late_report()?;
            let norm = last.norm.map(|norm| norm.hypot(sum_of_squares.sqrt()));
            Ok(Some(Last { finite: last.finite && finite, norm }))
        })
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.locked(py, |engine| Ok(engine.store().layout().len_bytes()))
    }

    /// A function for `every` may be one of an object that holds this accumulator.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.length_of.try_lock() {
            Ok(function) => function.iter().try_for_each(|function| visit.call(function)),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        if let Ok(mut function) = self.length_of.try_lock() {
            *function = None;
        }
    }

    #[getter]
    fn mapped_buffers(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |engine| Ok(engine.store().mapped_buffers()))
    }
}

impl Accumulator {
    /// Runs the engine, and waits for whoever else does.
    fn locked<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Engine) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        self.engine.run(py, usize::MAX, work)
    }

    /// The same, once all weights are known.
    fn weighed<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Engine) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        self.locked(py, |engine| {
            if let Some(weight) = engine.store().take_late_weight()? {
                engine.add_weight(weight)?;
            }
            work(engine)
        })
    }

    /// Runs what may open a window. Where its length is to be told, asks for it, without a lock, and runs again.
    fn opening<R: Send>(
        &self,
        py: Python<'_>,
        len_bytes: usize,
        mut work: impl FnMut(&mut Engine) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let mut told = None;
        loop {
            let result = self.engine.enter(py, len_bytes, |engine| {
                if let Some((window, length)) = told {
                    engine.set_next_length(window, length)?;
                }
                work(engine)
            });
            match result {
                Err(Error::Window(WindowError::NoLength { window })) => {
                    told = self.length(py, window)?.map(|length| (window, length));
                }
                result => return result.map_err(|error| self.engine.raise(py, error)),
            }
        }
    }

    /// The length of a window by the function for it; None if there is no such function any more.
    fn length(&self, py: Python<'_>, window: u64) -> PyResult<Option<u64>> {
        let function = {
            let function = self.length_of.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
            function.as_ref().map(|function| function.clone_ref(py))
        };
        function.map(|function| function.bind(py).call1((window,))?.extract()).transpose()
    }
}

/// Shape, dtype of sums, number of the flat buffer, and first element there.
type Param = (Vec<usize>, &'static str, usize, usize);
