//! DLPack: how tensors change hands without being copied.

pub mod abi;
mod export;
mod import;

pub use export::{export_legacy, export_versioned};
pub use import::{Imported, view};

use abi::DLPackVersion;

/// The version that is exported. Every 1.x is imported.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 0 };
