//! States on disk, as safetensors: sums as tensors, all else in the header's metadata.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors, View};
use serde::{Deserialize, Serialize};

use super::{ParamState, State, refuse};
use crate::accumulator::GradientAccumulator;
use crate::dtype::DType;
use crate::error::{Error, Result, TensorError};
use crate::schedule::{Goal, Schedule};
use crate::store::Store;
use crate::window::{Counters, Seen};

/// The version of what the metadata say. A later one is refused.
const VERSION: u64 = 1;

/// Before the name of each parameter, so that none is taken for the header's own entry.
const PREFIX: &str = "sums/";

impl<S: Store> GradientAccumulator<S> {
    /// Writes what this window holds to a safetensors file. It is written beside `path`, synced to the disk, and renamed:
    /// whatever was there before stays until then. Reads the sums where they lie.
    ///
    /// # Errors
    /// As for [`state`](Self::state), and [`Error::File`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.state()?.save(path)
    }

    /// Replaces what this window holds with what a file says, as [`load_state`](Self::load_state) does. Reads the whole
    /// file into memory.
    ///
    /// # Errors
    /// As for [`load_state`](Self::load_state); [`Error::File`]; and [`Error::State`] if the file is no such file, was cut
    /// short, or is of a later version. Then nothing has changed.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let read = || match fs::metadata(path)?.is_file() {
            true => fs::read(path),
            // A pipe may never end.
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")),
        };
        let bytes = read().map_err(|error| file_error(path, &error))?;
        self.load_state(&State::from_bytes(&bytes)?)
    }
}

/// How file systems say that they can't sync a folder.
const CAN_NOT_SYNC: [io::ErrorKind; 3] =
    [io::ErrorKind::InvalidInput, io::ErrorKind::Unsupported, io::ErrorKind::PermissionDenied];

/// The file that a path stands for: a link keeps pointing to where it points, be there something or not.
fn target(path: &Path) -> io::Result<PathBuf> {
    match fs::metadata(path) {
        Ok(there) if there.is_file() || there.is_dir() => fs::canonicalize(path),
        // A device or a pipe would be replaced by a file.
        Ok(_) => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is there, and no regular file")),
        Err(_) => match fs::read_link(path) {
            Ok(to) => Ok(path.parent().map_or_else(|| to.clone(), |folder| folder.join(&to))),
            Err(_) => Ok(path.to_owned()),
        },
    }
}

/// What the header's metadata say of one parameter.
#[derive(Serialize, Deserialize)]
struct Param<'a> {
    name: Cow<'a, str>,
    shape: Vec<usize>,
    dtype: Cow<'a, str>,
    seen: Cow<'a, str>,
}

/// One tensor of a file. Complex numbers are pairs there, by one more dimension of size 2.
struct Sums<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: &'a [u8],
}

impl View for &Sums<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes.into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

impl<B: AsRef<[u8]>> State<B> {
    /// Writes the state to a safetensors file, as [`GradientAccumulator::save`] does.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        check_byte_order()?;
        let path = path.as_ref();
        let tensors: Vec<_> = self.params.iter().filter_map(tensor).collect();
        let tensors = tensors.iter().map(|(name, sums)| (name, sums));
        self.write(tensors, path).map_err(|error| file_error(path, &error))
    }

    fn write<'a>(&self, tensors: impl Iterator<Item = (&'a String, &'a Sums<'a>)>, path: &Path) -> io::Result<()> {
        let path = target(path)?;
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let beside = tempfile::Builder::new()
            .prefix(".gradacc-")
            .suffix(".tmp")
            .make_in(&folder, |path| File::options().write(true).create_new(true).open(path))?;
        // Of the file that it replaces, or those of a new one by the process's mask.
        let permissions = fs::metadata(&path).or_else(|_| beside.as_file().metadata())?.permissions();
        let beside = beside.into_temp_path();
        // Replaces the file by one that it has written.
        safetensors::serialize_to_file(tensors, Some(self.metadata()), &beside).map_err(|error| match error {
            SafeTensorError::IoError(error) => error,
            error => io::Error::other(error),
        })?;
        let file = File::options().write(true).open(&beside)?;
        file.set_permissions(permissions)?;
        file.sync_all()?;
        beside.persist(&path).map_err(|error| error.error)?;
        // The new name is on the disk once the folder is. Some file systems have no such call for folders.
        #[cfg(unix)]
        match File::open(&folder).and_then(|folder| folder.sync_all()) {
            // Nor can one that may be written to and not read be opened for it.
            Err(error) if CAN_NOT_SYNC.contains(&error.kind()) => {}
            synced => synced?,
        }
        Ok(())
    }

    fn metadata(&self) -> HashMap<String, String> {
        let Counters { goal, count, weight, rejected, has_sums } = self.counters;
        let params: Vec<_> = self.params.iter().map(Param::of).collect();
        let mut metadata = HashMap::from([
            ("format", "gradacc".into()),
            ("version", VERSION.to_string()),
            ("window", self.window.to_string()),
            ("count", count.to_string()),
            // The shortest decimal that is read as the same number.
            ("weight", weight.to_string()),
            ("rejected", rejected.to_string()),
            ("has_sums", has_sums.to_string()),
            ("params", serde_json::to_string(&params).expect("names and sizes can be written")),
        ]);
        match goal {
            Some(Goal::Count(every)) => metadata.insert("every", every.to_string()),
            Some(Goal::Weight(weight)) => metadata.insert("until_weight", weight.to_string()),
            Some(Goal::Open) | None => None,
        };
        metadata.into_iter().map(|(key, value)| (key.into(), value)).collect()
    }
}

impl<'a> Param<'a> {
    fn of<B>(param: &'a ParamState<B>) -> Self {
        let (dtype, seen) = (param.dtype.name().into(), param.seen.name().into());
        Self { name: param.name.as_str().into(), shape: param.shape.to_vec(), dtype, seen }
    }
}

impl<'a> State<&'a [u8]> {
    /// Reads what [`save`](State::save) has written. Borrows the sums.
    ///
    /// # Errors
    /// [`Error::State`] if that is something else, was cut short, or is of a later version.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self> {
        check_byte_order()?;
        let no_file = |error: SafeTensorError| refuse(format!("this is no whole safetensors file: {error}"));
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(no_file)?;
        let tensors = SafeTensors::deserialize(bytes).map_err(no_file)?;
        let fields = Fields::of(&header)?;
        let params: Vec<Param<'_>> = serde_json::from_str(fields.text("params")?)
            .map_err(|error| refuse(format!("its metadata entry params makes no sense: {error}")))?;
        let params = params.into_iter().map(|param| read_param(param, &tensors)).collect::<Result<Vec<_>>>()?;
        if params.iter().filter(|param| param.sums.is_some()).count() != tensors.len() {
            return Err(refuse("it holds tensors that its metadata know nothing of"));
        }
        let (count, rejected) = (fields.number("count")?, fields.number("rejected")?);
        let counters = Counters {
            goal: match (fields.optional("every")?, fields.optional("until_weight")?) {
                _ if count == 0 && rejected == 0 => None,
                (None, None) => Some(Goal::Open),
                (Some(every), None) => Some(Goal::Count(every)),
                (None, Some(weight)) => {
                    Schedule::until_weight(weight).map_err(|error| refuse(error.to_string()))?;
                    Some(Goal::Weight(weight))
                }
                _ => return Err(refuse("it has both a length and a weight that completes the window")),
            },
            count,
            weight: fields.number("weight")?,
            rejected,
            has_sums: fields.number("has_sums")?,
        };
        Ok(Self { window: fields.number("window")?, counters, params })
    }
}

fn read_param<'a>(param: Param<'_>, tensors: &SafeTensors<'a>) -> Result<ParamState<&'a [u8]>> {
    let unknown = |error: TensorError| refuse(error.of(&*param.name).to_string());
    let dtype: DType = param.dtype.parse().map_err(unknown)?;
    let mut read = ParamState {
        name: param.name.into_owned(),
        shape: param.shape.into(),
        dtype,
        seen: Seen::from_name(&param.seen)?,
        sums: None,
    };
    if read.seen == Seen::Written {
        let name = &read.name;
        let found = tensors.tensor(&format!("{PREFIX}{name}"));
        let found = found.map_err(|_| refuse(format!("parameter {name}: the sum of it is missing")))?;
        let expected = Sums::kind(&read);
        if (found.dtype(), found.shape()) != (expected.0, &expected.1) {
            return Err(refuse(format!("parameter {name}: its sum is not what the metadata say")));
        }
        read.sums = Some(found.data());
    }
    Ok(read)
}

fn tensor<B: AsRef<[u8]>>(param: &ParamState<B>) -> Option<(String, Sums<'_>)> {
    let (dtype, shape) = Sums::kind(param);
    let bytes = param.sums.as_ref()?.as_ref();
    Some((format!("{PREFIX}{}", param.name), Sums { dtype, shape, bytes }))
}

impl Sums<'_> {
    fn kind<B>(param: &ParamState<B>) -> (Dtype, Vec<usize>) {
        let dtype = match param.dtype.component() {
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::F64 => Dtype::F64,
            _ => Dtype::F32,
        };
        let pair = param.dtype.is_complex().then_some(2);
        (dtype, param.shape.iter().copied().chain(pair).collect())
    }
}

/// The entries of the header's metadata.
struct Fields<'a>(&'a HashMap<String, String>);

impl<'a> Fields<'a> {
    fn of(header: &'a Metadata) -> Result<Self> {
        let fields = Self(header.metadata().as_ref().ok_or_else(|| refuse("it has no metadata of gradacc's"))?);
        if fields.0.get("format").is_none_or(|format| format != "gradacc") {
            return Err(refuse("its metadata are not of gradacc's"));
        }
        match fields.number("version")? {
            VERSION => Ok(fields),
            version => Err(refuse(format!("expected version {VERSION} of the format, got {version}"))),
        }
    }

    fn text(&self, key: &str) -> Result<&'a str> {
        let found = self.0.get(key).map(String::as_str);
        found.ok_or_else(|| refuse(format!("its metadata lack {key}")))
    }

    fn number<T: std::str::FromStr>(&self, key: &str) -> Result<T> {
        let text = self.text(key)?;
        text.parse().map_err(|_| refuse(format!("its metadata entry {key} makes no sense: {text}")))
    }

    fn optional<T: std::str::FromStr>(&self, key: &str) -> Result<Option<T>> {
        if self.0.contains_key(key) { self.number(key).map(Some) } else { Ok(None) }
    }
}

/// The format is little-endian, and sums are written as they lie.
fn check_byte_order() -> Result<()> {
    if cfg!(target_endian = "little") { Ok(()) } else { Err(refuse("files are for little-endian machines only")) }
}

fn file_error(path: &Path, error: &io::Error) -> Error {
    Error::File { path: path.to_owned(), kind: error.kind(), code: error.raw_os_error(), reason: error.to_string() }
}
