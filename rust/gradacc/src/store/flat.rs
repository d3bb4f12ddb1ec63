//! Sums in flat buffers in host memory.

use std::sync::Arc;

use super::{Closing, Report, Store};
use crate::buffer::{Lease, Pool, overlap};
use crate::dtype::DType;
use crate::error::{Result, TensorError};
use crate::gradients::Gradients;
use crate::kernels::{self, Job};
use crate::param::{Layout, ParamSpec};
use crate::view::TensorView;
use crate::window::Seen;

/// Sums in one flat buffer for each accumulation dtype.
///
/// Buffers are leased when the first gradient of a window arrives and leave with the window; they come back to be
/// used again when the last who holds them lets go.
pub struct FlatStore {
    layout: Arc<Layout>,
    /// What sums are kept in; None: what each parameter's dtype asks for.
    dtype: Option<DType>,
    buffers: Vec<Option<Lease>>,
    pool: Arc<Pool>,
}

impl FlatStore {
    /// An empty store that keeps all sums in one dtype, or each in [`DType::accumulation`] of its parameter's.
    pub fn new(dtype: Option<DType>) -> Self {
        Self { layout: Arc::default(), dtype, buffers: Vec::new(), pool: Pool::new() }
    }

    /// How many buffers were ever mapped. Stands still in a steady state.
    pub fn mapped_buffers(&self) -> u64 {
        self.pool.mapped()
    }

    /// [`Store::examine`] of gradients that a batch holds among others. Places are counted among these.
    ///
    /// # Errors
    /// As there.
    pub fn examine_views<'a>(&self, views: impl Iterator<Item = &'a TensorView<'a>>, norm: bool) -> Result<Report> {
        kernels::examine(&views.collect::<Vec<_>>(), norm)
    }

    /// [`Store::add`] of gradients that a batch holds among others. Places are counted among these.
    ///
    /// # Errors
    /// As there.
    pub fn add_views<'a>(
        &mut self,
        batch: impl Iterator<Item = (usize, &'a TensorView<'a>)> + Clone,
        scale: f64,
        seen: &[Seen],
        norm: bool,
    ) -> Result<Report> {
        let (mut len_bytes, mut any_first) = (0, false);
        let mut is_used = vec![false; self.buffers.len()];
        for (param, gradient) in batch.clone() {
            let slot = self.layout.slot(param);
            is_used[slot.buffer] = true;
            any_first |= seen[param] != Seen::Written;
            let (source, sums) = (gradient.dtype().component(), self.layout.buffers()[slot.buffer].dtype);
            len_bytes += gradient.stored_count() * (source.len_bytes() + sums.len_bytes());
        }
        for buffer in (0..self.buffers.len()).filter(|&buffer| is_used[buffer]) {
            self.layout.buffers()[buffer].dtype.check_scale(scale)?;
            self.lease(buffer)?;
        }
        if any_first {
            for (param, gradient) in batch.clone() {
                let slot = self.layout.slot(param);
                if let Some(buffer) = &mut self.buffers[slot.buffer] {
                    if gradient.rows().is_some() && seen[param] != Seen::Written {
                        buffer.clear(param, slot);
                    }
                    buffer.touch(param);
                }
            }
        }
        let layout = &self.layout;
        let jobs = batch.map(|(param, source)| {
            let write = seen[param] != Seen::Written && source.rows().is_none();
            Job { source, slot: layout.slot(param), write }
        });
        kernels::add(&mut self.buffers, jobs, len_bytes, scale, norm)
    }

    fn lease(&mut self, buffer: usize) -> Result<()> {
        let place = &mut self.buffers[buffer];
        if place.is_none() {
            *place = Some(self.pool.lease(buffer)?);
        }
        Ok(())
    }
}

impl Store for FlatStore {
    type Tensor<'a> = TensorView<'a>;
    type Taken = Gradients;
    type Sums<'a> = &'a [u8];

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn register(&mut self, spec: ParamSpec) -> Result<usize> {
        let accumulation = self.dtype.unwrap_or(spec.dtype.accumulation());
        let buffers = &self.buffers;
        let param = Arc::make_mut(&mut self.layout).push(spec, accumulation, |buffer| buffers[buffer].is_none())?;
        self.buffers.resize_with(self.layout.buffers().len(), || None);
        self.pool.follow(self.layout.buffers());
        Ok(param)
    }

    fn check(&self, param: usize, gradient: &TensorView<'_>) -> Result<()> {
        self.layout.check(param, gradient.shape(), gradient.dtype())?;
        let span = gradient.span();
        if self.buffers.iter().flatten().any(|buffer| overlap(&span, &buffer.span())) {
            return Err(TensorError::Overlap.of(&self.layout.spec(param).name));
        }
        Ok(())
    }

    fn has_handed_over(&self, gradient: &TensorView<'_>) -> bool {
        self.pool.has_lent(&gradient.span())
    }

    fn examine(&self, batch: &[(usize, TensorView<'_>)], norm: bool) -> Result<Report> {
        self.examine_views(batch.iter().map(|(_, gradient)| gradient), norm)
    }

    fn add(&mut self, batch: &[(usize, TensorView<'_>)], scale: f64, seen: &[Seen], norm: bool) -> Result<Report> {
        self.add_views(batch.iter().map(|(param, gradient)| (*param, gradient)), scale, seen, norm)
    }

    fn take(&mut self, closing: Closing) -> Result<Gradients> {
        for buffer in 0..self.buffers.len() {
            self.lease(buffer)?;
        }
        let mut buffers: Vec<Lease> = self.buffers.iter_mut().flat_map(Option::take).collect();
        for &(param, _) in closing.seen.iter().filter(|(_, written)| !written) {
            let slot = self.layout.slot(param);
            buffers[slot.buffer].clear(param, slot);
            // Its holder may write to it.
            buffers[slot.buffer].touch(param);
        }
        Ok(Gradients::new(Arc::clone(&self.layout), closing, buffers))
    }

    fn sums(&self, param: usize) -> Result<&[u8]> {
        let slot = self.layout.slot(param);
        let buffer = self.buffers[slot.buffer].as_ref().expect("sums that have been written lie in a buffer");
        Ok(buffer.bytes_of(slot))
    }

    fn load_sums(&mut self, sums: &[(usize, &[u8])]) -> Result<()> {
        let mut buffers: Vec<Option<Lease>> = Vec::new();
        buffers.resize_with(self.buffers.len(), || None);
        for &(param, bytes) in sums {
            let slot = self.layout.slot(param);
            let buffer = match &mut buffers[slot.buffer] {
                Some(buffer) => buffer,
                place => place.insert(self.pool.lease(slot.buffer)?),
            };
            buffer.touch(param);
            buffer.bytes_of_mut(slot).copy_from_slice(bytes);
        }
        self.buffers = buffers;
        Ok(())
    }

    fn reset(&mut self) {
        self.buffers.fill_with(|| None);
    }
}
