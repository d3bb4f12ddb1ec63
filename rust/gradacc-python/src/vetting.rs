//! Many torch tensors at once, as quickly as the guards of `torch.compile` can vet them.
//!
//! What DLPack does not tell of a torch tensor (whether it requires grad, whether a sign is still to be applied) costs
//! two calls for each, as much again as its description. Torch's own guards compare type, dtype, device, sizes, strides,
//! `requires_grad` and all such flags of a list of tensors with those of an earlier list in one call. So a list that was
//! looked at one by one is remembered, and later ones that the guard finds alike differ in their memory only.
//!
//! The guards are not a public interface of torch. They are used only after they have been tried out, in this process,
//! on tensors that they must tell apart; where they fail that, or are not there, tensors are looked at one by one.

use std::ffi::{CStr, c_void};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyList, PyString, PyTuple};
use pyo3::{ffi, intern};

use crate::store::Tensor;

/// Fewer tensors than this are looked at one by one: that is quick enough.
const WORTH_VETTING: usize = 32;

/// The parameters that tensors are gradients of, by number.
#[derive(Clone, PartialEq)]
pub(crate) enum Numbers {
    /// As many as there are, in layout order.
    All(usize),
    Some(Vec<usize>),
}

impl Numbers {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::All(len) => *len,
            Self::Some(numbers) => numbers.len(),
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> {
        (0..self.len()).map(move |place| match self {
            Self::All(_) => place,
            Self::Some(numbers) => numbers[place],
        })
    }
}

/// Bytes of all gradients.
pub(crate) fn len_bytes(tensors: &[(usize, Tensor<'_>)]) -> usize {
    tensors.iter().map(|(_, tensor)| tensor.len_bytes()).sum()
}

/// A list of tensors to compare others with.
pub(crate) struct Vetted {
    /// `TensorGuards.check` of torch.
    check: Py<PyAny>,
    numbers: Numbers,
    /// In ascending order, all in host memory, which may be gone.
    tensors: Vec<(usize, Tensor<'static>)>,
    len_bytes: usize,
}

impl Vetted {
    /// Remembers gradients that have been looked at one by one; None if it is not worth it or not possible.
    pub(crate) fn new(
        tensors: &Bound<'_, PyTuple>,
        numbers: &Numbers,
        looked_at: &[(usize, Tensor<'static>)],
    ) -> Option<Self> {
        // In another order the engine would sort the views away from the tensors.
        if tensors.len() < WORTH_VETTING || !numbers.iter().is_sorted() {
            return None;
        }
        let torch = Torch::get(tensors.py())?;
        if looked_at.iter().any(|(_, tensor)| matches!(tensor, Tensor::Torch(_))) {
            return None;
        }
        // One that is not looked at as it is must not be the model of others.
        let is_plain =
            |tensor: Bound<'_, PyAny>| tensor.get_type().is(&torch.tensor) && is_plain(&tensor).unwrap_or(false);
        if !tensors.iter().all(is_plain) {
            return None;
        }
        let check = torch.guard(tensors).ok()?.unbind();
        Some(Self { check, numbers: numbers.clone(), tensors: looked_at.to_vec(), len_bytes: len_bytes(looked_at) })
    }

    /// Whether tensors are all alike those remembered, and gradients of the same parameters. Then `tensors` are they,
    /// for as long as the tuple is there.
    pub(crate) fn admit(&mut self, tensors: &Bound<'_, PyTuple>, numbers: &Numbers) -> bool {
        let py = tensors.py();
        let passes = || self.check.bind(py).call1(tensors).and_then(|passed| passed.is_truthy());
        let Some(torch) = Torch::get(py).filter(|_| self.numbers == *numbers && passes().unwrap_or(false)) else {
            return false;
        };
        for ((_, looked_at), tensor) in self.tensors.iter_mut().zip(tensors.iter_borrowed()) {
            let Tensor::Host(view) = looked_at else { return false };
            // SAFETY: the guard found it to be a torch tensor, which this function of torch is for, in host memory and
            // with the sizes and strides of the one it is alike to. The tuple keeps it alive.
            unsafe { view.set_data((torch.data_of)(tensor.as_ptr())) };
        }
        true
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    pub(crate) fn tensors(&mut self) -> &mut [(usize, Tensor<'static>)] {
        &mut self.tensors
    }
}

/// Whether a torch tensor is looked at as it is.
fn is_plain(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let has = |attribute: &Bound<'_, PyString>| tensor.getattr(attribute)?.is_truthy();
    let answers = |method: &Bound<'_, PyString>| tensor.call_method0(method)?.is_truthy();
    Ok(!has(intern!(py, "requires_grad"))?
        && !has(intern!(py, "is_sparse"))?
        && !answers(intern!(py, "is_neg"))?
        && !answers(intern!(py, "is_conj"))?)
}

/// What is used of torch's guards.
struct Torch {
    tensor: Py<PyAny>,
    guards: Py<PyAny>,
    /// The address of a torch tensor's first element.
    data_of: unsafe extern "C" fn(*mut ffi::PyObject) -> *const c_void,
}

impl Torch {
    /// None if this torch has no such guards, or they failed to tell tensors apart.
    fn get(py: Python<'_>) -> Option<&'static Self> {
        static TORCH: PyOnceLock<Option<Torch>> = PyOnceLock::new();
        TORCH.get_or_init(py, || Self::load(py).ok().flatten()).as_ref()
    }

    fn load(py: Python<'_>) -> PyResult<Option<Self>> {
        let guards = py.import("torch._C._dynamo.guards")?;
        let address: usize = guards.getattr("_torchinductor_pyobject_tensor_data_ptr")?.extract()?;
        if address == 0 {
            return Ok(None);
        }
        // SAFETY: torch publishes the address of `void *(PyObject *)` for compiled code to call under that name.
        let data_of =
            unsafe { std::mem::transmute::<usize, unsafe extern "C" fn(*mut ffi::PyObject) -> *const c_void>(address) };
        let tensor = py.import("torch")?.getattr("Tensor")?;
        let torch = Self { tensor: tensor.unbind(), guards: guards.getattr("TensorGuards")?.unbind(), data_of };
        Ok(torch.tells_tensors_apart(py)?.then_some(torch))
    }

    /// `check` of a guard for these tensors: their sizes and strides too.
    fn guard<'py>(&self, tensors: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        let py = tensors.py();
        let (sizes, strides) = (PyList::empty(py), PyList::empty(py));
        for tensor in tensors {
            sizes.append(tensor.getattr(intern!(py, "shape"))?.try_iter()?.collect::<PyResult<Vec<_>>>()?)?;
            strides.append(tensor.call_method0(intern!(py, "stride"))?.try_iter()?.collect::<PyResult<Vec<_>>>()?)?;
        }
        let options = [("dynamic_dims_sizes", sizes), ("dynamic_dims_strides", strides)].into_py_dict(py)?;
        self.guards.bind(py).call(tensors, Some(&options))?.getattr("check")
    }

    /// Tries a guard out on one tensor that it must let pass and on those that it must not.
    fn tells_tensors_apart(&self, py: Python<'_>) -> PyResult<bool> {
        const ALIKE: &CStr = c"torch.arange(24.)[12:].view(4, 3)";
        const OTHERS: [&CStr; 10] = [
            c"torch.ones(3, 4)",
            c"torch.ones(12)",
            c"torch.ones(3, 4).T",
            c"torch.ones(8, 3)[::2]",
            c"torch.ones(4, 3, dtype=torch.int32)",
            c"torch.ones(4, 3, requires_grad=True)",
            c"torch.ones(4, 3, requires_grad=True) * 2",
            c"torch._neg_view(torch.ones(4, 3))",
            c"torch.ones(4, 3, device='meta')",
            c"torch.ones(4, 3).to_sparse()",
        ];
        let names = [("torch", py.import("torch")?)].into_py_dict(py)?;
        let make = |code: &CStr| py.eval(code, Some(&names), None);
        let check = self.guard(&PyTuple::new(py, [make(c"torch.ones(4, 3)")?])?)?;
        let passes = |tensor: &Bound<'_, PyAny>| check.call1((tensor,))?.is_truthy();
        let alike = make(ALIKE)?;
        // SAFETY: this function of torch is for torch tensors, as this one is.
        let data = unsafe { (self.data_of)(alike.as_ptr()) };
        let mut apart = passes(&alike)? && data.addr() == alike.call_method0("data_ptr")?.extract::<usize>()?;
        for other in OTHERS {
            apart &= !passes(&make(other)?)?;
        }
        let complex = make(c"torch.ones(4, 3, dtype=torch.complex64)")?;
        let check = self.guard(&PyTuple::new(py, [&complex])?)?;
        apart &= !check.call1((complex.call_method0("conj")?,))?.is_truthy()?;
        Ok(apart)
    }
}
