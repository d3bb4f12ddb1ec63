//! What a window hands over.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::buffer::Lease;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::kernels::{self, Factor};
use crate::param::{Layout, ParamId, Shape, Slot, element_count};
use crate::store::Closing;
use crate::view::TensorView;

/// Something that has gradients of parameters: what an accumulator adds, and what an optimizer takes.
///
/// A trainer implements it for its own container of gradients; [`Gradients`] implements it too, so that one optimizer
/// takes either.
pub trait HasGradients {
    /// Calls `visit` once for each gradient there is, in any order.
    ///
    /// # Errors
    /// If the gradients can't be given.
    fn for_each_gradient<'a>(&'a self, visit: &mut dyn FnMut(ParamId, TensorView<'a>)) -> Result<()>;
}

impl HasGradients for [(ParamId, TensorView<'_>)] {
    fn for_each_gradient<'a>(&'a self, visit: &mut dyn FnMut(ParamId, TensorView<'a>)) -> Result<()> {
        self.iter().for_each(|(id, view)| visit(*id, view.clone()));
        Ok(())
    }
}

impl HasGradients for Vec<(ParamId, TensorView<'_>)> {
    fn for_each_gradient<'a>(&'a self, visit: &mut dyn FnMut(ParamId, TensorView<'a>)) -> Result<()> {
        self.as_slice().for_each_gradient(visit)
    }
}

impl<S: BuildHasher> HasGradients for HashMap<ParamId, TensorView<'_>, S> {
    fn for_each_gradient<'a>(&'a self, visit: &mut dyn FnMut(ParamId, TensorView<'a>)) -> Result<()> {
        self.iter().for_each(|(id, view)| visit(*id, view.clone()));
        Ok(())
    }
}

impl HasGradients for BTreeMap<ParamId, TensorView<'_>> {
    fn for_each_gradient<'a>(&'a self, visit: &mut dyn FnMut(ParamId, TensorView<'a>)) -> Result<()> {
        self.iter().for_each(|(id, view)| visit(*id, view.clone()));
        Ok(())
    }
}

impl HasGradients for Gradients {
    fn for_each_gradient<'a>(&'a self, visit: &mut dyn FnMut(ParamId, TensorView<'a>)) -> Result<()> {
        let buffers = self.settled()?;
        for &param in &self.seen {
            let (spec, slot) = (self.layout.spec(param), self.layout.slot(param));
            visit(spec.id, buffers[slot.buffer].view(slot.offset, &spec.shape, self.layout.sums_dtype(param)));
        }
        Ok(())
    }
}

/// The gradients of one window. Owns their buffers, and shares them with everything it hands out.
///
/// What is to be divided, scaled or clipped is so in one pass over the buffers, when the first gradient is handed out;
/// until then it is a number. Once handed out, a gradient never changes: scaling afterwards goes into new buffers.
pub struct Gradients {
    layout: Arc<Layout>,
    /// Parameters that the window saw, ascending.
    seen: Vec<usize>,
    count: u64,
    weight: f64,
    rejected: u64,
    /// Buffers whose factor is still to be applied; None once they are in `settled`.
    pending: Mutex<Option<Pending>>,
    settled: OnceLock<Vec<Arc<Lease>>>,
}

struct Pending {
    buffers: Vec<Arc<Lease>>,
    divisor: f64,
    multiplier: f64,
}

impl Pending {
    /// What a buffer's elements must be multiplied with or divided by; None if they are right as they are.
    fn factor(&self, dtype: DType) -> Option<Factor> {
        let reciprocal = self.divisor.recip();
        if self.multiplier == 1.0 && (dtype == DType::F64 || !reciprocal.is_finite()) {
            return (self.divisor != 1.0).then_some(Factor::DividedBy(self.divisor));
        }
        let factor = self.multiplier * reciprocal;
        (factor != 1.0).then_some(Factor::Times(factor))
    }
}

impl Gradients {
    /// Every buffer of the layout, with the sums of the parameters that `closing` saw in it.
    pub(crate) fn new(layout: Arc<Layout>, closing: Closing, buffers: Vec<Lease>) -> Self {
        let pending =
            Pending { buffers: buffers.into_iter().map(Arc::new).collect(), divisor: closing.divisor, multiplier: 1.0 };
        Self {
            layout,
            seen: closing.seen.into_iter().map(|(param, _)| param).collect(),
            count: closing.count,
            weight: closing.weight,
            rejected: closing.rejected,
            pending: Mutex::new(Some(pending)),
            settled: OnceLock::new(),
        }
    }

    /// How many micro-batches the window held.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their weight. 0 says that all of them were masked, and the gradients are zeros.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// How many more were skipped for being non-finite.
    pub fn rejected(&self) -> u64 {
        self.rejected
    }

    /// The parameters there are gradients of, by their numbers in the layout, ascending.
    pub fn params(&self) -> &[usize] {
        &self.seen
    }

    /// The parameters there are gradients of, in layout order.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = ParamId> {
        self.seen.iter().map(|&param| self.layout.spec(param).id)
    }

    /// All parameters the accumulator knew, and where they lie in the flat buffers.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The Euclidean norm of all gradients as they will be handed over, in f64. Reads the buffers once.
    ///
    /// # Errors
    /// Only if an environment variable of this crate is wrong.
    pub fn norm(&self) -> Result<f64> {
        self.norm_of(&self.seen)
    }

    /// The norm of some of the gradients, by their parameters' numbers in the layout. Panics if the window did not see one.
    ///
    /// # Errors
    /// As for [`norm`](Self::norm).
    pub fn norm_of(&self, params: &[usize]) -> Result<f64> {
        params.iter().for_each(|&param| self.check_seen(param));
        let pending = self.lock();
        let Some(pending) = pending.as_ref() else {
            drop(pending);
            return Ok(self.sum_of_squares(self.settled()?, params)?.sqrt());
        };
        let norm = self.sum_of_squares(&pending.buffers, params)?.sqrt();
        Ok(norm * pending.multiplier.abs() / pending.divisor)
    }

    fn check_seen(&self, param: usize) {
        assert!(self.seen.binary_search(&param).is_ok(), "the window has not seen parameter {param}");
    }

    fn sum_of_squares(&self, buffers: &[Arc<Lease>], params: &[usize]) -> Result<f64> {
        let slots = params.iter().map(|&param| self.layout.slot(param));
        let view = |slot: Slot| {
            let buffer = &buffers[slot.buffer];
            buffer.view(slot.offset, &[slot.len], buffer.dtype())
        };
        let views: Vec<_> = slots.map(view).collect();
        Ok(kernels::examine(&views.iter().collect::<Vec<_>>(), true)?.sum_of_squares)
    }

    /// Scales all gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does: by
    /// `max_norm / (norm + 1e-6)` where that is below 1, and not at all elsewhere. Gradients handed out before keep
    /// their values. Returns the norm before.
    ///
    /// # Errors
    /// [`Error::Argument`] if `max_norm` is negative or NaN.
    pub fn clip(&mut self, max_norm: f64) -> Result<f64> {
        check_max_norm(max_norm)?;
        let norm = self.norm()?;
        self.clip_as_part(max_norm, norm)?;
        Ok(norm)
    }

    /// Scales these gradients as [`clip`](Self::clip) would if they were a part of some whose norm is `norm`: of those of
    /// several devices or processes. Returns the factor.
    ///
    /// # Errors
    /// As there.
    pub fn clip_as_part(&mut self, max_norm: f64, norm: f64) -> Result<f64> {
        check_max_norm(max_norm)?;
        let coefficient = max_norm / (norm + 1e-6);
        if coefficient < 1.0 || coefficient.is_nan() {
            self.multiply(coefficient);
            return Ok(coefficient);
        }
        Ok(1.0)
    }

    /// Multiplies all gradients with `factor`. Gradients handed out before keep their values.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is NaN or infinite.
    pub fn scale(&mut self, factor: f64) -> Result<()> {
        if !factor.is_finite() {
            return Err(Error::argument("factor", format!("expected a finite number, got {factor}")));
        }
        self.multiply(factor);
        Ok(())
    }

    fn multiply(&mut self, factor: f64) {
        let pending = self.pending.get_mut().unwrap_or_else(PoisonError::into_inner);
        let settled = self.settled.take();
        let pending = pending.get_or_insert_with(|| Pending {
            buffers: settled.unwrap_or_default(),
            divisor: 1.0,
            multiplier: 1.0,
        });
        pending.multiplier *= factor;
    }

    /// The gradient of a parameter; None if the window did not see it. Shares the buffer.
    ///
    /// # Errors
    /// If the factor has to go into new buffers and there is no memory for them.
    pub fn get(&self, id: ParamId) -> Result<Option<Gradient>> {
        match self.layout.index_of(id).filter(|param| self.seen.binary_search(param).is_ok()) {
            Some(param) => self.at(param).map(Some),
            None => Ok(None),
        }
    }

    /// The gradient of a parameter by its number in the layout. Shares the buffer. Panics if the window did not see it.
    ///
    /// # Errors
    /// As for [`get`](Self::get).
    pub fn at(&self, param: usize) -> Result<Gradient> {
        self.check_seen(param);
        let slot = self.layout.slot(param);
        let buffer = Arc::clone(&self.settled()?[slot.buffer]);
        Ok(Gradient {
            buffer,
            slot,
            shape: self.layout.spec(param).shape.clone(),
            dtype: self.layout.sums_dtype(param),
        })
    }

    /// The flat buffers themselves, one for each dtype of sums (more, if parameters were registered within windows).
    /// Shares them. Each parameter lies at its offset in the layout, in row-major order, complex numbers as pairs;
    /// parameters that the window did not see, and the padding between parameters, are zeros.
    ///
    /// # Errors
    /// As for [`get`](Self::get).
    pub fn flat(&self) -> Result<Vec<Gradient>> {
        Ok(flat(self.settled()?))
    }

    /// The flat buffers as [`flat`](Self::flat) has them, but for the division by the weight and everything else that is
    /// still to be applied, so that the sums of several accumulators can be added up in place. What lies in them outside
    /// of these gradients is not zero.
    ///
    /// # Errors
    /// [`Error::Argument`] if a gradient has been handed out, with everything applied.
    pub fn sums(&self) -> Result<Vec<Gradient>> {
        match self.lock().as_ref() {
            Some(pending) => Ok(flat(&pending.buffers)),
            None => Err(Error::argument("sums", "the gradients have been handed out, and are no sums any more")),
        }
    }

    /// The buffers with everything applied. Applies it, if that has not been done.
    fn settled(&self) -> Result<&[Arc<Lease>]> {
        let mut pending = self.lock();
        if let Some(state) = pending.as_mut() {
            self.settle(state)?;
            // Empty now: it is emptied and filled with the lock held, or by an exclusive borrow.
            let _ = self.settled.set(std::mem::take(&mut state.buffers));
            *pending = None;
        }
        Ok(self.settled.get().map_or(&[], Vec::as_slice))
    }

    /// Applies what is pending: in place, or to copies of buffers that somebody has been handed before.
    fn settle(&self, state: &mut Pending) -> Result<()> {
        let is_shared = |buffer: &mut Arc<Lease>| Arc::get_mut(buffer).is_none();
        let factors: Vec<_> = state.buffers.iter().map(|buffer| state.factor(buffer.dtype())).collect();
        // Whatever can fail comes first, so that no buffer is ever scaled twice.
        let mut copies = Vec::with_capacity(factors.len());
        for (buffer, factor) in state.buffers.iter_mut().zip(&factors) {
            copies.push(if factor.is_some() && is_shared(buffer) { Some(buffer.sibling()?) } else { None });
        }
        for (index, ((buffer, copy), factor)) in state.buffers.iter_mut().zip(copies).zip(factors).enumerate() {
            let slots = || self.seen.iter().map(|&param| self.layout.slot(param)).filter(|slot| slot.buffer == index);
            if let Some(mut copy) = copy {
                self.clear_unseen(&mut copy, index);
                if let Some(factor) = factor {
                    kernels::scale(&mut copy, Some(buffer), &slots().collect::<Vec<_>>(), factor)?;
                }
                let seen = self.seen.iter().filter(|&&param| self.layout.slot(param).buffer == index);
                seen.for_each(|&param| copy.touch(param));
                *buffer = Arc::new(copy);
            } else if let Some(own) = Arc::get_mut(buffer) {
                self.clear_unseen(own, index);
                if let Some(factor) = factor {
                    kernels::scale(own, None, &slots().collect::<Vec<_>>(), factor)?;
                }
            }
        }
        Ok(())
    }

    /// Makes zeros of what earlier windows have left in a buffer that this one did not write.
    fn clear_unseen(&self, buffer: &mut Lease, index: usize) {
        let everywhere = buffer.take_padding_exposed();
        let mut end = 0;
        for param in 0..self.layout.len() {
            let Slot { buffer: place, offset, len } = self.layout.slot(param);
            if place != index {
                continue;
            }
            if everywhere {
                buffer.fill_zero(end..offset);
                end = offset + len;
            }
            // Whoever was handed the whole buffer may have written anywhere.
            if (everywhere || buffer.is_touched(param)) && self.seen.binary_search(&param).is_err() {
                buffer.fill_zero(offset..offset + len);
                buffer.untouch(param);
            }
        }
        if everywhere {
            let len = buffer.len();
            buffer.fill_zero(end..len);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Pending>> {
        // A panic in a kernel leaves the factor applied in part: whatever is handed out then is wrong only in a process
        // that goes on after a bug of this crate.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn flat(buffers: &[Arc<Lease>]) -> Vec<Gradient> {
    let whole = |(index, buffer): (usize, &Arc<Lease>)| {
        buffer.expose_padding();
        let slot = Slot { buffer: index, offset: 0, len: buffer.len() };
        let shape = Shape::from_slice(&[slot.len]);
        Gradient { buffer: Arc::clone(buffer), slot, shape, dtype: buffer.dtype() }
    };
    buffers.iter().enumerate().map(whole).collect()
}

fn check_max_norm(max_norm: f64) -> Result<()> {
    if max_norm.is_nan() || max_norm < 0.0 {
        return Err(Error::argument("max_norm", format!("expected a number of at least 0, got {max_norm}")));
    }
    Ok(())
}

/// One gradient that was handed over, or one flat buffer. Shares the memory, and keeps it alive.
#[derive(Clone)]
pub struct Gradient {
    buffer: Arc<Lease>,
    slot: Slot,
    shape: Shape,
    dtype: DType,
}

impl Gradient {
    /// A gradient of bytes in row-major order, in the byte order of this machine, which are copied.
    ///
    /// # Errors
    /// [`Error::Argument`] if the shape has another number of bytes; or if there is no memory.
    pub fn copy_of(bytes: &[u8], dtype: DType, shape: &[usize]) -> Result<Self> {
        let len_bytes = element_count(shape).and_then(|count| count.checked_mul(dtype.len_bytes()));
        if len_bytes != Some(bytes.len()) {
            return Err(Error::argument("bytes", format!("{} bytes have not the shape {shape:?}", bytes.len())));
        }
        let buffer = Arc::new(Lease::of_bytes(bytes, dtype.component())?);
        let slot = Slot { buffer: 0, offset: 0, len: buffer.len() };
        Ok(Self { buffer, slot, shape: shape.into(), dtype })
    }

    /// Its dtype: that of the sums.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its shape; elements lie in row-major order.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Where its elements start; on a 64-byte boundary.
    pub fn as_ptr(&self) -> *const u8 {
        self.buffer.as_ptr().wrapping_add(self.slot.offset * self.buffer.dtype().len_bytes())
    }

    /// The same elements in memory of their own, at the cost of a copy.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn to_owned_copy(&self) -> Result<Self> {
        let buffer = Arc::new(self.buffer.copy(self.slot.offset, self.slot.len)?);
        Ok(Self { buffer, slot: Slot { buffer: 0, offset: 0, len: self.slot.len }, ..self.clone() })
    }

    /// Its elements.
    ///
    /// Whoever has got the same gradient through DLPack may write to it, by unsafe means, and has to see to it that
    /// nobody reads meanwhile.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is of another dtype.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        if T::DTYPE != self.dtype() {
            return Err(Error::argument(
                "T",
                format!("expected the element type of {}, got {}", self.dtype(), T::DTYPE),
            ));
        }
        Ok(self.buffer.elements(self.slot.offset..self.slot.offset + self.slot.len))
    }
}
