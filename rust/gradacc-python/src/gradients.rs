//! `_core.Gradients`, and what shares its memory.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use gradacc::{DType, Error};
use pyo3::exceptions::{PyBufferError, PyKeyError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::store::Taken;
use crate::{capsule, errors};

/// An id, number of the flat buffer, first element there, and how many there are.
type Place<'py> = (Bound<'py, PyAny>, usize, usize, usize);

/// The gradients of one window, by ids.
#[pyclass(frozen, module = "gradacc._core")]
pub(crate) struct Gradients {
    engine: RwLock<gradacc::Gradients>,
    /// `gradacc.torch.store.Sums`, of those that are torch's.
    torch: Option<Py<PyAny>>,
    /// Ids the window saw, in layout order, each with its number.
    numbers: Py<PyDict>,
    /// Numbers of those that are torch's, ascending.
    of_torch: Vec<usize>,
    /// Which of the engine's buffers are of use to anybody.
    is_used: Vec<bool>,
    /// Every id the accumulator knew.
    known: Py<PyList>,
    count: u64,
    weight: f64,
    rejected: u64,
}

impl Gradients {
    pub(crate) fn new(taken: Taken, ids: &Bound<'_, PyList>) -> PyResult<Self> {
        let py = ids.py();
        let numbers = PyDict::new(py);
        for &(number, _) in &taken.seen {
            numbers.set_item(ids.get_item(number)?, number)?;
        }
        let engine = taken.host;
        Ok(Self {
            torch: taken.torch,
            numbers: numbers.unbind(),
            of_torch: taken.seen.into_iter().filter(|&(_, is_torch)| is_torch).map(|(number, _)| number).collect(),
            is_used: taken.is_used,
            known: ids.get_slice(0, engine.layout().len()).unbind(),
            count: engine.count(),
            weight: engine.weight(),
            rejected: engine.rejected(),
            engine: RwLock::new(engine),
        })
    }

    /// The flat buffers that are of use, of those that the engine has.
    fn used(&self, flat: Vec<gradacc::Gradient>) -> impl Iterator<Item = Memory> {
        flat.into_iter().zip(&self.is_used).filter(|&(_, &is_used)| is_used).map(|(flat, _)| Memory(flat))
    }

    fn multiply_torch(&self, py: Python<'_>, factor: f64) -> PyResult<()> {
        if let Some(torch) = &self.torch {
            torch.call_method1(py, intern!(py, "multiply"), (factor,))?;
        }
        Ok(())
    }

    /// Reads without the GIL.
    fn read<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&gradacc::Gradients) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let result = py.detach(|| work(&self.engine.read().unwrap_or_else(PoisonError::into_inner)));
        result.map_err(|error| errors::raise(py, error))
    }

    /// Changes without the GIL.
    fn write<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut gradacc::Gradients) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let result = py.detach(|| work(&mut self.engine.write().unwrap_or_else(PoisonError::into_inner)));
        result.map_err(|error| errors::raise(py, error))
    }
}

#[pymethods]
impl Gradients {
    #[getter]
    fn ids(&self, py: Python<'_>) -> Py<PyList> {
        self.numbers.bind(py).keys().unbind()
    }

    #[getter]
    fn known(&self, py: Python<'_>) -> Py<PyList> {
        self.known.clone_ref(py)
    }

    #[getter]
    fn count(&self) -> u64 {
        self.count
    }

    #[getter]
    fn weight(&self) -> f64 {
        self.weight
    }

    #[getter]
    fn rejected(&self) -> u64 {
        self.rejected
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.numbers.bind(py).len()
    }

    fn __contains__(&self, id: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.numbers.bind(id.py()).contains(id)
    }

    fn __getitem__<'py>(slf: &Bound<'py, Self>, id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let number = this.numbers.bind(py).get_item(id)?;
        let number: usize = number.ok_or_else(|| PyKeyError::new_err(id.clone().unbind()))?.extract()?;
        if let Some(torch) = this.torch.as_ref().filter(|_| this.of_torch.binary_search(&number).is_ok()) {
            return torch.bind(py).call_method1(intern!(py, "at"), (number,));
        }
        let (shape, dtype) = this.read(py, |gradients| {
            let layout = gradients.layout();
            Ok((layout.spec(number).shape.to_vec(), layout.sums_dtype(number)))
        })?;
        let gradient = Gradient { gradients: slf.clone().unbind(), number, shape, dtype };
        Ok(gradient.into_pyobject(py)?.into_any())
    }

    /// Of some ids, or of all.
    #[pyo3(signature = (ids=None))]
    fn norm(&self, py: Python<'_>, ids: Option<Vec<Bound<'_, PyAny>>>) -> PyResult<f64> {
        let numbers = match ids {
            None => self.numbers.bind(py).values().extract::<Vec<usize>>()?,
            Some(ids) => {
                let number = |id| -> PyResult<usize> { self.numbers.bind(py).as_any().get_item(id)?.extract() };
                ids.into_iter().map(number).collect::<PyResult<_>>()?
            }
        };
        let (of_torch, of_engine): (Vec<_>, Vec<_>) =
            numbers.into_iter().partition(|number| self.of_torch.binary_search(number).is_ok());
        let norm = self.read(py, |gradients| gradients.norm_of(&of_engine))?;
        match &self.torch {
            Some(torch) if !of_torch.is_empty() => {
                let of_torch: f64 = torch.call_method1(py, intern!(py, "norm"), (of_torch,))?.extract(py)?;
                Ok(norm.hypot(of_torch))
            }
            _ => Ok(norm),
        }
    }

    /// Where the sums of each gradient lie: its id, which of the buffers of `sums` (the engine's come first), the first
    /// element there, and how many they are.
    fn places<'py>(&self, py: Python<'py>) -> PyResult<Vec<Place<'py>>> {
        let slots: Vec<_> = self.read(py, |gradients| {
            Ok((0..gradients.layout().len()).map(|param| gradients.layout().slot(param)).collect())
        })?;
        let of_torch: HashMap<usize, (usize, usize, usize)> = match &self.torch {
            Some(torch) => torch.bind(py).call_method0(intern!(py, "places"))?.extract()?,
            None => HashMap::new(),
        };
        let used_before = |buffer: usize| self.is_used[..buffer].iter().filter(|&&is_used| is_used).count();
        let used = used_before(self.is_used.len());
        let place = |(id, number): (Bound<'py, PyAny>, Bound<'py, PyAny>)| {
            let number: usize = number.extract()?;
            Ok(match of_torch.get(&number) {
                Some(&(buffer, offset, len)) => (id, used + buffer, offset, len),
                None => (id, used_before(slots[number].buffer), slots[number].offset, slots[number].len),
            })
        };
        self.numbers.bind(py).iter().map(place).collect()
    }

    /// Clips as a part of gradients whose norm is `norm`.
    fn clip_(&self, py: Python<'_>, max_norm: f64, norm: f64) -> PyResult<()> {
        let factor = self.write(py, |gradients| gradients.clip_as_part(max_norm, norm))?;
        if factor == 1.0 { Ok(()) } else { self.multiply_torch(py, factor) }
    }

    fn scale_(&self, py: Python<'_>, factor: f64) -> PyResult<()> {
        self.write(py, |gradients| gradients.scale(factor))?;
        self.multiply_torch(py, factor)
    }

    /// The flat buffers: the engine's, and torch's.
    fn flat<'py>(&self, py: Python<'py>) -> PyResult<(Vec<Memory>, Vec<Bound<'py, PyAny>>)> {
        let of_torch = match &self.torch {
            Some(torch) => torch.bind(py).call_method0(intern!(py, "flat"))?.extract()?,
            None => Vec::new(),
        };
        Ok((self.used(self.read(py, gradacc::Gradients::flat)?).collect(), of_torch))
    }

    /// The same as they are before anything is applied.
    fn sums<'py>(&self, py: Python<'py>) -> PyResult<(Vec<Memory>, Vec<Bound<'py, PyAny>>)> {
        let of_torch = match &self.torch {
            Some(torch) => torch.bind(py).call_method0(intern!(py, "sums"))?.extract()?,
            None => Vec::new(),
        };
        Ok((self.used(self.read(py, gradacc::Gradients::sums)?).collect(), of_torch))
    }
}

/// The gradient of one parameter. Reads nothing until it is asked for its elements.
///
/// Every consumer gets the same memory, writable: `numpy.asarray`, and `from_dlpack` of NumPy, PyTorch and JAX. That
/// memory stays with whoever got it; it is not changed by a later window, nor by a later `scale_` or `clip_`.
#[pyclass(frozen, module = "gradacc")]
pub(crate) struct Gradient {
    gradients: Py<Gradients>,
    number: usize,
    shape: Vec<usize>,
    dtype: DType,
}

impl Gradient {
    fn shared(&self, py: Python<'_>) -> PyResult<gradacc::Gradient> {
        self.gradients.get().read(py, |gradients| gradients.at(self.number))
    }
}

#[pymethods]
impl Gradient {
    /// A tuple of ints.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The name of the dtype, such as "float32".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Gradient(shape={}, dtype={})", self.shape(py)?.repr()?, self.dtype))
    }

    /// `(1, 0)`: host memory.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (gradacc::dlpack::abi::DEVICE_CPU, 0)
    }

    /// A capsule that aliases the memory, or with `copy=True` a copy of it. Versioned if `max_version` is at least 1.0.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<Bound<'py, PyTuple>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(stream) = stream {
            return Err(PyBufferError::new_err(format!(
                "stream: expected None for host memory, got {}",
                stream.repr()?
            )));
        }
        if let Some(device) = dl_device.filter(|&device| device != self.__dlpack_device__()) {
            return Err(PyBufferError::new_err(format!("dl_device: expected (1, 0), host memory, got {device:?}")));
        }
        let mut gradient = self.shared(py)?;
        if copy == Some(true) {
            gradient = py.detach(|| gradient.to_owned_copy()).map_err(|error| errors::raise(py, error))?;
        }
        capsule::export(py, gradient, is_versioned(max_version)?)
    }

    /// An array that aliases the memory, unless another dtype or `copy=True` asks for a copy.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = Memory(self.shared(py)?).array(py)?;
        let numpy_dtype = array.getattr(intern!(py, "dtype"))?;
        match dtype {
            Some(dtype) if !numpy_dtype.eq(&dtype)? => {
                if copy == Some(false) {
                    let message = format!("a {} gradient can't be given as {dtype} without a copy", self.dtype);
                    return Err(PyValueError::new_err(message));
                }
                array.call_method1(intern!(py, "astype"), (dtype,))
            }
            _ if copy == Some(true) => array.call_method0(intern!(py, "copy")),
            _ => Ok(array),
        }
    }
}

/// Memory that was handed over, for `numpy.asarray`, which keeps this object alive.
#[pyclass(frozen, module = "gradacc._core")]
pub(crate) struct Memory(gradacc::Gradient);

impl Memory {
    pub(crate) fn new(gradient: gradacc::Gradient) -> Self {
        Self(gradient)
    }

    /// An array that aliases it, of a dtype that NumPy knows by itself: uint16 for bfloat16.
    pub(crate) fn plain_array(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        py.import(intern!(py, "numpy"))?.call_method1(intern!(py, "asarray"), (self,))
    }

    /// An array that aliases it.
    fn array(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let dtype = self.0.dtype();
        let array = self.plain_array(py)?;
        if dtype != DType::BF16 {
            return Ok(array);
        }
        let extended = py.import(intern!(py, "ml_dtypes")).map_err(|cause| {
            let message = "NumPy has no bfloat16 of its own: install ml_dtypes, or use torch() or jax()";
            let error = pyo3::exceptions::PyImportError::new_err(message);
            error.set_cause(py, Some(cause));
            error
        })?;
        array.call_method1(intern!(py, "view"), (extended.getattr(intern!(py, "bfloat16"))?,))
    }
}

#[pymethods]
impl Memory {
    /// bfloat16 goes as uint16, since NumPy has no name for it.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let order = if cfg!(target_endian = "little") { '<' } else { '>' };
        let kind = match self.0.dtype() {
            DType::BF16 => 'u',
            dtype if dtype.is_complex() => 'c',
            _ => 'f',
        };
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", PyTuple::new(py, self.0.shape())?)?;
        interface.set_item("typestr", format!("{order}{kind}{}", self.0.dtype().len_bytes()))?;
        interface.set_item("data", (self.0.as_ptr().addr(), false))?;
        Ok(interface)
    }

    #[pyo3(name = "array")]
    fn to_array<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self(slf.get().0.clone()).array(slf.py())
    }
}

/// Whether a consumer that gives this `max_version` knows DLPack 1.x.
fn is_versioned(max_version: Option<Bound<'_, PyTuple>>) -> PyResult<bool> {
    max_version.map_or(Ok(false), |version| Ok(version.get_item(0)?.extract::<i64>()? >= 1))
}
