//! Where sums are kept.
//!
//! The type of the elements is erased here, once per buffer: whoever counts micro-batches needs to know neither dtypes
//! nor devices.

mod flat;

pub use flat::FlatStore;

use crate::error::Result;
use crate::param::{Layout, ParamSpec};
use crate::window::Seen;

/// What was found out about the gradients of a micro-batch, before any scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// The first gradient, by its place in the batch, that holds NaN or infinity.
    pub first_nonfinite: Option<usize>,
    /// Of all elements, in f64; 0 if it was not asked for.
    pub sum_of_squares: f64,
}

/// What a window hands over with its sums.
#[derive(Clone, Debug, PartialEq)]
pub struct Closing {
    /// The parameters the window saw, ascending; and whether their sums were written, or are zero for never having
    /// been.
    pub seen: Vec<(usize, bool)>,
    /// What the sums are to be divided by.
    pub divisor: f64,
    /// How many micro-batches were added.
    pub count: u64,
    /// Their weight.
    pub weight: f64,
    /// How many micro-batches were skipped for being non-finite.
    pub rejected: u64,
}

/// The sums of a set of parameters. Parameters go by their number in the layout.
///
/// A batch is in ascending order of parameters, each at most once, and every entry of it has passed
/// [`check`](Self::check).
pub trait Store {
    /// What a gradient is given as.
    type Tensor<'a>;
    /// What a closed window's sums are handed over as.
    type Taken;
    /// What the bytes of a parameter's sums are given as.
    type Sums<'a>: AsRef<[u8]>
    where
        Self: 'a;

    /// The parameters and where they lie.
    fn layout(&self) -> &Layout;

    /// Makes room for a parameter, moving nothing; returns its number.
    ///
    /// # Errors
    /// If the id is known already, or there is no room.
    fn register(&mut self, spec: ParamSpec) -> Result<usize>;

    /// Whether a gradient can be added to a parameter. Reads no element.
    ///
    /// # Errors
    /// Names the parameter, what was expected and what came.
    fn check(&self, param: usize, gradient: &Self::Tensor<'_>) -> Result<()>;

    /// Whether a gradient lies in memory that was handed over and that somebody still holds.
    fn has_handed_over(&self, gradient: &Self::Tensor<'_>) -> bool;

    /// Reads a batch and writes nothing. `norm` asks for the sum of squares.
    ///
    /// # Errors
    /// Only if nothing can be read at all.
    fn examine(&self, batch: &[(usize, Self::Tensor<'_>)], norm: bool) -> Result<Report>;

    /// Adds `scale` times each gradient to its sum. A sum that has not been written in this window, as `seen` tells for
    /// every parameter, is written instead, so that nothing of an earlier window is left in it.
    ///
    /// # Errors
    /// Before anything is written: if the scale is beyond the sums' range, or there is no memory. Later only as an
    /// [`Error::Store`](crate::Error::Store) that says so: the window is broken then.
    fn add(&mut self, batch: &[(usize, Self::Tensor<'_>)], scale: f64, seen: &[Seen], norm: bool) -> Result<Report>;

    /// Hands the sums over, without touching those that were written, and starts with none.
    ///
    /// # Errors
    /// If there is no memory; the sums are kept then.
    fn take(&mut self, closing: Closing) -> Result<Self::Taken>;

    /// The bytes of a parameter's sums, which have been written in this window, in row-major order.
    ///
    /// # Errors
    /// If they can't be had.
    fn sums(&self, param: usize) -> Result<Self::Sums<'_>>;

    /// Forgets the sums, and has those of some parameters instead. There are as many bytes as the sums have.
    ///
    /// # Errors
    /// If there is no memory; the sums are kept then.
    fn load_sums(&mut self, sums: &[(usize, &[u8])]) -> Result<()>;

    /// Forgets the sums.
    fn reset(&mut self);
}
