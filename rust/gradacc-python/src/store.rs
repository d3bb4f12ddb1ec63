//! Sums of any device: the engine's own store for gradients in host memory, and one that calls torch for the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use gradacc::{
    BufferSpec, Closing, DType, Error, FlatStore, Gradients, Layout, ParamSpec, Report, Result, Seen, Shape, Store,
    TensorError, TensorView,
};
use pyo3::call::PyCallArgs;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use pyo3::{IntoPyObjectExt, intern};

/// A gradient.
#[derive(Clone)]
pub(crate) enum Tensor<'a> {
    /// In host memory, for the engine.
    Host(TensorView<'a>),
    /// For torch.
    Torch(Box<TorchTensor>),
}

/// A torch tensor on any device, without a sign or a graph of its own; the caller keeps it alive.
pub(crate) struct TorchTensor {
    pub(crate) object: Py<PyAny>,
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) device: String,
}

impl Clone for TorchTensor {
    fn clone(&self) -> Self {
        let object = Python::attach(|py| self.object.clone_ref(py));
        Self { object, shape: self.shape.clone(), dtype: self.dtype, device: self.device.clone() }
    }
}

impl Tensor<'_> {
    pub(crate) fn len_bytes(&self) -> usize {
        match self {
            Self::Host(view) => view.len() * view.dtype().len_bytes(),
            Self::Torch(tensor) => tensor.shape.iter().product::<usize>() * tensor.dtype.len_bytes(),
        }
    }
}

/// What a window's sums are handed over as.
pub(crate) struct Taken {
    pub(crate) host: Gradients,
    /// `gradacc.torch.store.Sums`, if any are torch's.
    pub(crate) torch: Option<Py<PyAny>>,
    /// The parameters that the window saw, ascending, and whether theirs are torch's.
    pub(crate) seen: Vec<(usize, bool)>,
    /// Which of the engine's buffers are of use to anybody.
    pub(crate) is_used: Vec<bool>,
}

/// Bytes of sums, borrowed or fetched from a device.
pub(crate) enum Bytes<'a> {
    Host(&'a [u8]),
    Fetched(Vec<u8>),
}

impl AsRef<[u8]> for Bytes<'_> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Host(bytes) => bytes,
            Self::Fetched(bytes) => bytes,
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// Nothing has been written yet.
    Nowhere,
    Host,
    /// On a device by its number in `devices`.
    Torch(usize),
}

/// Sums of parameters on any device. Within a window those of one parameter lie in one place.
pub(crate) struct DeviceStore {
    host: FlatStore,
    /// `gradacc.torch.store.Store`, once there is something for it.
    torch: Option<Py<PyAny>>,
    /// Whether all sums are torch's, those in host memory too.
    all_torch: bool,
    /// Whether non-finite gradients are refused, so that they have to be found at once.
    examines: bool,
    /// Whether the batch that comes next has been examined.
    is_examined: AtomicBool,
    /// By parameter: where its sums lie, or lay last.
    is_torch: Vec<bool>,
    /// By parameter: where its sums of this window lie.
    places: Vec<Place>,
    /// The devices that torch's tensors were on.
    devices: Vec<String>,
    /// What the gradients that come are multiplied with, if only a device knows it.
    late_scale: Mutex<Option<Py<PyAny>>>,
    /// Weights of micro-batches that only a device knows.
    late_weights: Mutex<Vec<Py<PyAny>>>,
    /// Where gradients of the parameter that is registered next are expected.
    next_device: Mutex<Option<String>>,
    /// What torch raised last.
    failure: Mutex<Option<PyErr>>,
}

impl DeviceStore {
    pub(crate) fn new(dtype: Option<DType>, all_torch: bool, examines: bool) -> Self {
        Self {
            host: FlatStore::new(dtype),
            torch: None,
            all_torch,
            examines,
            is_examined: AtomicBool::new(false),
            is_torch: Vec::new(),
            places: Vec::new(),
            devices: Vec::new(),
            late_scale: Mutex::default(),
            late_weights: Mutex::default(),
            next_device: Mutex::default(),
            failure: Mutex::default(),
        }
    }

    pub(crate) fn mapped_buffers(&self) -> u64 {
        self.host.mapped_buffers()
    }

    pub(crate) fn has_torch(&self) -> bool {
        self.torch.is_some()
    }

    /// Says where gradients of the parameter that is registered next are expected.
    pub(crate) fn expect_next(&self, device: &str) {
        *locked(&self.next_device) = Some(device.to_owned());
    }

    /// Gives a tensor that the gradients which come are multiplied with, in place of the scale; None takes it away.
    pub(crate) fn set_late_scale(&self, scale: Option<Py<PyAny>>) {
        let before = std::mem::replace(&mut *locked(&self.late_scale), scale);
        drop(before);
    }

    /// Gives a tensor that is the weight of a micro-batch.
    pub(crate) fn push_late_weight(&self, weight: Py<PyAny>) {
        locked(&self.late_weights).push(weight);
    }

    /// Forgets weights and a scale that were given as tensors.
    fn forget_late(&self) {
        self.set_late_scale(None);
        let weights = std::mem::take(&mut *locked(&self.late_weights));
        drop(weights);
    }

    /// The sum of the weights that were given as tensors, which are forgotten; None if there are none. Waits for the
    /// device.
    pub(crate) fn take_late_weight(&self) -> Result<Option<f64>> {
        let weights = std::mem::take(&mut *locked(&self.late_weights));
        if weights.is_empty() {
            return Ok(None);
        }
        let total = Python::attach(|py| {
            let module = py.import(intern!(py, "gradacc.torch.store"))?;
            module.call_method1(intern!(py, "total"), (&weights,))?.extract()
        });
        total.map(Some).map_err(|error| {
            *locked(&self.late_weights) = weights;
            self.fail(error)
        })
    }

    /// What torch has raised, if that is why a call failed.
    pub(crate) fn take_failure(&self) -> Option<PyErr> {
        locked(&self.failure).take()
    }

    /// What is known of the last micro-batch by torch alone: whether it was finite, and the sum of squares. Waits for the
    /// device.
    pub(crate) fn late_report(&self) -> Result<(bool, f64)> {
        if self.torch.is_none() {
            return Ok((true, 0.0));
        }
        self.call("late_report", |answer| answer.extract(), ())
    }

    /// Makes what was found out since the last call that of the last micro-batch.
    pub(crate) fn keep_report(&self) -> Result<()> {
        if self.torch.is_none() {
            return Ok(());
        }
        self.call("keep_report", |_| Ok(()), ())
    }

    fn number_of(&mut self, device: &str) -> usize {
        let known = self.devices.iter().position(|known| known == device);
        known.unwrap_or_else(|| {
            self.devices.push(device.to_owned());
            self.devices.len() - 1
        })
    }

    fn settle(&mut self, param: usize, place: Place) {
        self.places[param] = place;
        self.is_torch[param] = place != Place::Host;
    }

    /// Calls a method of the store that torch's sums are in.
    fn call<R>(
        &self,
        method: &str,
        read: impl FnOnce(Bound<'_, PyAny>) -> PyResult<R>,
        arguments: impl for<'py> PyCallArgs<'py>,
    ) -> Result<R> {
        Python::attach(|py| {
            let torch = self.torch.as_ref().expect("asked for only where there is one").bind(py);
            torch
                .getattr(method)
                .and_then(|method| method.call1(arguments))
                .and_then(read)
                .map_err(|error| self.fail(error))
        })
    }

    fn fail(&self, error: PyErr) -> Error {
        let reason = error.to_string();
        let before = locked(&self.failure).replace(error);
        drop(before);
        Error::Store { reason, is_added: false }
    }

    /// Makes the store for torch's sums, unless there is one.
    fn torch_store(&mut self) -> Result<()> {
        if self.torch.is_some() {
            return Ok(());
        }
        let layout = self.host.layout();
        let specs: Vec<_> = (0..layout.len()).map(|param| describe(layout, param)).collect();
        let made = Python::attach(|py| {
            let module = py.import(intern!(py, "gradacc.torch.store"))?;
            let store = module.call_method0(intern!(py, "Store"))?;
            for (param, (shape, dtype, is_complex)) in specs.into_iter().enumerate() {
                store.call_method1(intern!(py, "register"), (param, shape, dtype, is_complex, py.None()))?;
            }
            Ok(store.unbind())
        });
        self.torch = Some(made.map_err(|error| self.fail(error))?);
        Ok(())
    }

    /// The first of torch's gradients, counted among these, that is not finite, and their sum of squares. Waits for the
    /// device.
    fn examine_torch(&self, batch: &[(usize, Tensor<'_>)], norm: bool) -> Result<(Option<usize>, f64)> {
        let found = Python::attach(|py| {
            let (_, tensors, _) = Self::torch_part(batch, &[]);
            let module = py.import(intern!(py, "gradacc.torch.store"))?;
            module.call_method1(intern!(py, "examine"), (tensors, norm))?.extract()
        });
        found.map_err(|error| self.fail(error))
    }

    /// Torch's part of a batch: numbers, tensors, and whether each is the first of its window.
    fn torch_part(batch: &[(usize, Tensor<'_>)], seen: &[Seen]) -> (Vec<usize>, Vec<Py<PyAny>>, Vec<bool>) {
        let (mut numbers, mut tensors, mut firsts) = (Vec::new(), Vec::new(), Vec::new());
        Python::attach(|py| {
            for (param, tensor) in batch {
                if let Tensor::Torch(tensor) = tensor {
                    numbers.push(*param);
                    tensors.push(tensor.object.clone_ref(py));
                    firsts.push(seen.get(*param) != Some(&Seen::Written));
                }
            }
        });
        (numbers, tensors, firsts)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shape, the dtype of flat buffers, and whether the numbers are complex.
fn describe(layout: &Layout, param: usize) -> (Vec<usize>, &'static str, bool) {
    let spec = layout.spec(param);
    let BufferSpec { dtype, .. } = layout.buffers()[layout.slot(param).buffer];
    (spec.shape.to_vec(), dtype.name(), spec.dtype.is_complex())
}

fn host_part<'a>(batch: &'a [(usize, Tensor<'a>)]) -> impl Iterator<Item = (usize, &'a TensorView<'a>)> + Clone {
    batch.iter().filter_map(|(param, tensor)| match tensor {
        Tensor::Host(view) => Some((*param, view)),
        Tensor::Torch(_) => None,
    })
}

fn has_torch(batch: &[(usize, Tensor<'_>)]) -> bool {
    batch.iter().any(|(_, tensor)| matches!(tensor, Tensor::Torch(_)))
}

/// The place in the batch of the `nth` entry that is torch's, or is not.
fn place_of(batch: &[(usize, Tensor<'_>)], is_torch: bool, nth: usize) -> Option<usize> {
    let of_kind = |(_, (_, tensor)): &(usize, &(usize, Tensor<'_>))| matches!(tensor, Tensor::Torch(_)) == is_torch;
    batch.iter().enumerate().filter(of_kind).nth(nth).map(|(place, _)| place)
}

/// The report of a whole batch, of those of its parts.
fn merge(batch: &[(usize, Tensor<'_>)], host: Report, (nth, sum_of_squares): (Option<usize>, f64)) -> Report {
    let of_host = host.first_nonfinite.and_then(|nth| place_of(batch, false, nth));
    let of_torch = nth.and_then(|nth| place_of(batch, true, nth));
    Report {
        first_nonfinite: of_host.into_iter().chain(of_torch).min(),
        sum_of_squares: host.sum_of_squares + sum_of_squares,
    }
}

impl Store for DeviceStore {
    type Tensor<'a> = Tensor<'a>;
    type Taken = Taken;
    type Sums<'a> = Bytes<'a>;

    fn layout(&self) -> &Layout {
        self.host.layout()
    }

    fn register(&mut self, spec: ParamSpec) -> Result<usize> {
        let param = self.host.register(spec)?;
        let device = self.next_device.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let device = device.unwrap_or_else(|| "cpu".into());
        self.is_torch.push(self.all_torch || device != "cpu");
        self.places.push(Place::Nowhere);
        if self.is_torch[param] {
            self.torch_store()?;
        }
        if self.torch.is_some() {
            let (shape, dtype, is_complex) = describe(self.host.layout(), param);
            let device = self.is_torch[param].then_some(device);
            self.call("register", |_| Ok(()), (param, shape, dtype, is_complex, device))?;
        }
        Ok(param)
    }

    fn check(&self, param: usize, gradient: &Tensor<'_>) -> Result<()> {
        let place = self.places[param];
        let got = match gradient {
            Tensor::Host(view) => {
                self.host.check(param, view)?;
                if !matches!(place, Place::Torch(_)) {
                    return Ok(());
                }
                "cpu"
            }
            Tensor::Torch(tensor) => {
                self.layout().check(param, &tensor.shape, tensor.dtype)?;
                &tensor.device
            }
        };
        let expected = match place {
            Place::Nowhere => return Ok(()),
            Place::Host => "cpu",
            Place::Torch(device) => &self.devices[device],
        };
        if expected != got {
            let (expected, got) = (expected.to_owned(), got.to_owned());
            return Err(TensorError::OtherDevice { expected, got }.of(&self.layout().spec(param).name));
        }
        Ok(())
    }

    fn has_handed_over(&self, gradient: &Tensor<'_>) -> bool {
        match gradient {
            Tensor::Host(view) => self.host.has_handed_over(view),
            Tensor::Torch(_) if self.torch.is_none() => false,
            Tensor::Torch(tensor) => {
                let ask = Python::attach(|py| tensor.object.clone_ref(py));
                self.call("has_handed_over", |answer| answer.extract(), (ask,)).unwrap_or(false)
            }
        }
    }

    fn examine(&self, batch: &[(usize, Tensor<'_>)], norm: bool) -> Result<Report> {
        let host = self.host.examine_views(host_part(batch).map(|(_, view)| view), norm)?;
        if !has_torch(batch) {
            return Ok(Report { first_nonfinite: host.first_nonfinite, ..host });
        }
        let torch = self.examine_torch(batch, norm)?;
        let report = merge(batch, host, torch);
        // What was refused is not added, and must not vouch for what is.
        self.is_examined.store(report.first_nonfinite.is_none(), Ordering::Relaxed);
        Ok(report)
    }

    fn add(&mut self, batch: &[(usize, Tensor<'_>)], scale: f64, seen: &[Seen], norm: bool) -> Result<Report> {
        let (is_torch, is_examined) = (has_torch(batch), self.is_examined.swap(false, Ordering::Relaxed));
        let late_scale = Python::attach(|py| locked(&self.late_scale).as_ref().map(|scale| scale.clone_ref(py)));
        if is_torch {
            self.torch_store()?;
            for (param, _) in batch.iter().filter(|(_, tensor)| matches!(tensor, Tensor::Torch(_))) {
                let layout = self.host.layout();
                layout.buffers()[layout.slot(*param).buffer].dtype.check_scale(scale)?;
            }
            let (numbers, tensors, _) = Self::torch_part(batch, seen);
            // What is found out is asked for later: now would mean to wait for the device.
            let (norm, finite) = (norm && !self.examines, !self.examines);
            self.call("prepare", |_| Ok(()), (numbers, tensors, norm, finite, &late_scale))?;
        }
        let host_scale = match &late_scale {
            // In host memory it has to be known.
            Some(late) if host_part(batch).next().is_some() => {
                let late = Python::attach(|py| late.call_method0(py, intern!(py, "item"))?.extract(py));
                late.map_err(|error| self.fail(error))?
            }
            _ => scale,
        };
        let host = self.host.add_views(host_part(batch), host_scale, seen, norm)?;
        // Those that had been written before lie where they lay.
        for (param, tensor) in batch.iter().filter(|(param, _)| seen[*param] != Seen::Written) {
            let place = match tensor {
                Tensor::Host(_) => Place::Host,
                Tensor::Torch(tensor) => Place::Torch(self.number_of(&tensor.device)),
            };
            self.settle(*param, place);
        }
        if !is_torch {
            return Ok(host);
        }
        let (numbers, tensors, firsts) = Self::torch_part(batch, seen);
        let scale = late_scale.is_none().then_some(scale);
        let added = self.call("add", |_| Ok(()), (numbers, tensors, firsts, scale)).and_then(|()| {
            if self.examines && !is_examined { self.examine_torch(batch, norm) } else { Ok((None, 0.0)) }
        });
        match added {
            Ok(torch) => Ok(merge(batch, host, torch)),
            // Torch may have done some of it, and the engine has done its own part.
            Err(Error::Store { reason, .. }) => Err(Error::Store { reason, is_added: true }),
            Err(error) => Err(error),
        }
    }

    fn take(&mut self, closing: Closing) -> Result<Taken> {
        let seen: Vec<_> = closing.seen.iter().map(|&(param, _)| (param, self.is_torch[param])).collect();
        let (torch, host): (Vec<_>, Vec<_>) = closing.seen.iter().partition(|&&(param, _)| self.is_torch[param]);
        let torch = match &self.torch {
            Some(_) => Some(self.call("take", |taken| Ok(taken.unbind()), (torch, closing.divisor))?),
            None => None,
        };
        let layout = self.host.layout();
        let mut is_used = vec![false; layout.buffers().len()];
        (0..layout.len())
            .filter(|&param| !self.is_torch[param])
            .for_each(|param| is_used[layout.slot(param).buffer] = true);
        let host = self.host.take(Closing { seen: host, ..closing })?;
        self.places.fill(Place::Nowhere);
        Ok(Taken { host, torch, seen, is_used })
    }

    fn sums(&self, param: usize) -> Result<Bytes<'_>> {
        if !self.is_torch[param] {
            return self.host.sums(param).map(Bytes::Host);
        }
        let bytes = |bytes: Bound<'_, PyAny>| Ok(bytes.cast::<PyBytes>()?.as_bytes().to_vec());
        self.call("sums", bytes, (param,)).map(Bytes::Fetched)
    }

    fn load_sums(&mut self, sums: &[(usize, &[u8])]) -> Result<()> {
        let (torch, host): (Vec<_>, Vec<_>) = sums.iter().partition(|&&(param, _)| self.is_torch[param]);
        if !torch.is_empty() {
            self.torch_store()?;
        }
        let mut devices: Vec<String> = Vec::new();
        if self.torch.is_some() {
            let loaded = Python::attach(|py| -> PyResult<_> {
                let bytes = torch.iter().map(|&(param, bytes)| (param, PyBytes::new(py, bytes)));
                bytes.collect::<Vec<_>>().into_py_any(py)
            });
            let loaded = loaded.map_err(|error| self.fail(error))?;
            devices = self.call("load", |devices| devices.extract(), (loaded,))?;
        }
        self.host.load_sums(&host)?;
        self.forget_late();
        self.places.fill(Place::Nowhere);
        host.iter().for_each(|&(param, _)| self.places[param] = Place::Host);
        for (&(param, _), device) in torch.iter().zip(devices) {
            self.places[param] = Place::Torch(self.number_of(&device));
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.host.reset();
        self.forget_late();
        self.places.fill(Place::Nowhere);
        if self.torch.is_some() {
            // It forgets, which can't fail; and what can is said by the next call.
            let _ = self.call("reset", |_| Ok(()), ());
        }
    }
}
