//! Gradients accumulated over micro-batches, exactly and at memory speed.
//!
//! A [`GradientAccumulator`] owns flat, typed buffers keyed by parameter id. [`add`](GradientAccumulator::add) adds the
//! gradients of a micro-batch into them, in place, with every core; [`take`](GradientAccumulator::take) hands over
//! [`Gradients`]: the sums over the weight of all that was added. Gradients come in as [`TensorView`]s of memory that
//! stays where it is, and go out shared, by slice or through [`dlpack`].
//!
//! Trainers meet it at [`HasGradients`], which their containers of gradients implement, and which optimizers take.

// Unsafe code lives in `buffer`, `dlpack`, `kernels` and `view`; SAFETY.md says what it rests on.
#[forbid(unsafe_code)]
mod accumulator;
mod buffer;
#[forbid(unsafe_code)]
mod builder;
pub mod dlpack;
#[forbid(unsafe_code)]
mod dtype;
#[forbid(unsafe_code)]
mod error;
#[forbid(unsafe_code)]
mod gradients;
mod kernels;
#[forbid(unsafe_code)]
mod micro_batch;
#[forbid(unsafe_code)]
mod param;
#[forbid(unsafe_code)]
mod schedule;
#[forbid(unsafe_code)]
mod state;
#[forbid(unsafe_code)]
mod store;
mod view;
#[forbid(unsafe_code)]
mod window;

pub use accumulator::{Added, GradientAccumulator, Last};
pub use builder::{Builder, OnMissing, OnNonFinite};
pub use dtype::{DType, Element};
pub use error::{Error, Result, TensorError, WindowError};
pub use gradients::{Gradient, Gradients, HasGradients};
pub use half::{bf16, f16};
pub use kernels::{SimdLevel, num_threads, set_num_threads, simd_level};
pub use micro_batch::MicroBatch;
pub use param::{BufferSpec, Layout, ParamId, ParamSpec, SLOT_ALIGNMENT, Shape, Slot};
pub use schedule::{Goal, Lengths, Schedule};
pub use state::{ParamState, State};
pub use store::{Closing, FlatStore, Report, Store};
pub use view::TensorView;
pub use window::{Counters, Reduction, Seen, Share, Weight};
