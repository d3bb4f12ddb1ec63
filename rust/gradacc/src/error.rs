//! What can go wrong, with the parameter, what was expected and what came.

use std::path::PathBuf;
use std::{fmt, io};

use crate::dtype::DType;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call was refused. A refused call has changed nothing, unless its documentation says otherwise.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// One tensor does not fit its parameter.
    #[error("parameter {parameter}: {reason}")]
    Tensor {
        /// The parameter's name.
        parameter: String,
        /// What does not fit.
        reason: TensorError,
    },
    /// No such parameter has been registered.
    #[error("unknown parameter {parameter}: it was never registered with this accumulator")]
    UnknownParameter {
        /// The name that was given.
        parameter: String,
    },
    /// A parameter was registered twice, or two gradients were given for it in one micro-batch.
    #[error("parameter {parameter} is given twice")]
    DuplicateParameter {
        /// The parameter's name.
        parameter: String,
    },
    /// A gradient is missing where all were asked for.
    #[error("parameter {parameter} has no gradient in this micro-batch, and on_missing is \"error\"")]
    MissingGradient {
        /// The first parameter that lacks one.
        parameter: String,
    },
    /// A sequence of gradients has not one entry for each parameter.
    #[error("expected a sequence of {expected} gradients, one for each parameter in layout order, got {got}")]
    SequenceLength {
        /// How many parameters there are.
        expected: usize,
        /// How many entries came.
        got: usize,
    },
    /// The call does not fit the state of the window.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// A gradient holds NaN or infinity, and such micro-batches are refused.
    #[error("parameter {parameter}: its gradient holds NaN or infinity; {}", outcome(.is_added))]
    NonFinite {
        /// The first parameter whose gradient does.
        parameter: String,
        /// Whether the micro-batch came in parts and is in the sums, so that the window is broken.
        is_added: bool,
    },
    /// An argument is out of its range.
    #[error("{name}: {reason}")]
    Argument {
        /// The argument's name.
        name: &'static str,
        /// What was expected and what came.
        reason: String,
    },
    /// A state can't be loaded.
    #[error("the state can't be loaded: {reason}")]
    State {
        /// What differs.
        reason: String,
    },
    /// A file can't be written or read.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kind of failure.
        kind: io::ErrorKind,
        /// The number that the operating system gave it.
        code: Option<i32>,
        /// What the system said.
        reason: String,
    },
    /// A store that is not of this crate failed, for a reason of its own.
    #[error("{reason}")]
    Store {
        /// What it said.
        reason: String,
        /// Whether part of the micro-batch may be in the sums, so that the window is broken.
        is_added: bool,
    },
    /// The operating system gave no memory for a buffer.
    #[error("no memory for a buffer of {len_bytes} bytes: {reason}")]
    Memory {
        /// The size asked for.
        len_bytes: usize,
        /// What the system said.
        reason: String,
    },
}

impl Error {
    /// An argument out of range: its name, and "expected ..., got ...".
    pub(crate) fn argument(name: &'static str, reason: impl Into<String>) -> Self {
        Self::Argument { name, reason: reason.into() }
    }
}

/// What about one tensor does not fit.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The shape differs. Nothing broadcasts.
    #[error("expected shape {}, got {}", Shape(.expected), Shape(.got))]
    Shape {
        /// The parameter's shape.
        expected: Box<[usize]>,
        /// The tensor's shape.
        got: Box<[usize]>,
    },
    /// The dtype can't be added into the parameter's buffer.
    #[error("expected a gradient of dtype {accepted}, got {got}")]
    Dtype {
        /// What its buffer takes.
        accepted: String,
        /// What came.
        got: String,
    },
    /// The memory is not the host's.
    #[error("expected a tensor in host memory, got one on DLPack device type {device_type}")]
    Device {
        /// DLPack's number of the device type.
        device_type: i32,
    },
    /// The parameter's sums lie on another device in this window.
    #[error("expected a gradient on {expected}, where this window's sums of it lie, got one on {got}")]
    OtherDevice {
        /// Where its sums lie.
        expected: String,
        /// Where the gradient lies.
        got: String,
    },
    /// The tensor lies in the buffer it is to be added to.
    #[error("expected a gradient in memory of its own, got one that lies in a buffer its sums are kept in")]
    Overlap,
    /// The tensor lies in memory that an earlier window handed over, and was to be a fresh gradient.
    #[error(
        "its gradient lies in memory that an earlier window handed over, to which backward has added: call \
         optimizer.zero_grad() after the step, with set_to_none=True"
    )]
    HandedOver,
    /// The description of the tensor makes no sense: a negative size, or more bytes than can be addressed.
    #[error("{0}")]
    Malformed(String),
}

impl TensorError {
    /// Names the parameter the tensor was meant for.
    pub fn of(self, parameter: impl Into<String>) -> Error {
        Error::Tensor { parameter: parameter.into(), reason: self }
    }

    /// A dtype, by its name, that no buffer takes.
    pub fn unsupported(dtype: impl Into<String>) -> Self {
        Self::Dtype { accepted: DType::names(DType::ALL), got: dtype.into() }
    }
}

/// Why the window does not allow a call. The window is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WindowError {
    /// `add` on a window that has all its micro-batches.
    #[error("the window is complete ({count} micro-batches): call take() or reset() before the next add()")]
    Complete {
        /// How many it holds.
        count: u64,
    },
    /// `take` of a window without micro-batches.
    #[error("the window is empty ({rejected} micro-batches were rejected): there is nothing to take")]
    Empty {
        /// How many were skipped for being non-finite.
        rejected: u64,
    },
    /// Any call but `reset` on a window that holds part of a micro-batch that failed.
    #[error(
        "the window is broken: a micro-batch failed after part of it had been added; call reset() and start it again"
    )]
    Broken,
    /// A call that has no place within a micro-batch that comes in parts.
    #[error("a micro-batch is open: until it ends, there can be nothing but its parts (add_part), or reset()")]
    MicroBatchOpen,
    /// A part of no micro-batch.
    #[error(
        "no micro-batch is open: parts are added, and backward of an attached model is called, within \
         `with acc.micro_batch(weight=n):`"
    )]
    NoMicroBatch,
    /// The first micro-batch of a window whose length was to be told before.
    #[error("nobody has told how many micro-batches window {window} is to have")]
    NoLength {
        /// The window's number.
        window: u64,
    },
    /// A mean over weight zero.
    #[error(
        "the window's weight is 0 but gradients were added with a scale: their mean is undefined; \
         add a micro-batch with a weight, or use reduction \"sum\""
    )]
    NoWeight,
}

/// What became of a micro-batch that was refused.
fn outcome(is_added: &bool) -> &'static str {
    if *is_added {
        "its micro-batch is in the sums, part by part, so the window is broken: call reset()"
    } else {
        "nothing of this micro-batch was added"
    }
}

/// Prints a shape as Python prints a tuple.
pub(crate) struct Shape<'a>(pub(crate) &'a [usize]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (axis, size) in self.0.iter().enumerate() {
            write!(f, "{}{size}", if axis > 0 { ", " } else { "" })?;
        }
        f.write_str(if self.0.len() == 1 { ",)" } else { ")" })
    }
}
