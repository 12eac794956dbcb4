//! Where output goes and how it looks: stdout is data, stderr is talk.
//!
//! Every table, JSON and CSV of the program passes through here, so that text which came from users or clouds can
//! never move a terminal's cursor, and so that colours appear on terminals only.

use std::io::{IsTerminal as _, Write as _};

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table};
use serde::Serialize;

use crate::error::ExpectedError;

/// `-o`: how data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Format {
    /// For people; fits the terminal, or 80 columns.
    #[default]
    Table,
    /// For people with a wide window: every column.
    Wide,
    /// For programs; money is a decimal string of dollars.
    Json,
    /// For spreadsheets; every column, money in dollars.
    Csv,
}

/// How this run talks.
#[derive(Debug, Clone, Copy)]
pub struct Out {
    pub format: Format,
    /// Colours on stdout.
    pub colour: bool,
    /// Only data and errors.
    pub quiet: bool,
    /// Columns that a table may take.
    pub width: u16,
    /// Someone watches stderr, so a progress line may move.
    pub live: bool,
}

/// What a cell means; colours follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tone {
    #[default]
    Plain,
    Good,
    Busy,
    Waiting,
    Bad,
}

/// One value of a table: for people, and exactly for CSV.
#[derive(Debug, Clone, Default)]
pub struct Cell {
    text: String,
    exact: Option<String>,
    tone: Tone,
}

/// A column. `key` names it in CSV.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    pub title: &'static str,
    pub key: &'static str,
    pub shown: Shown,
    pub align: Align,
    pub fit: Fit,
}

/// What a column does where the table is too wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// Stays as wide as its content, as numbers should.
    Whole,
    /// Its text is broken into lines.
    Wraps,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    Always,
    Wide,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// A table before it is laid out.
#[derive(Debug, Clone)]
pub struct Grid {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

/// Narrower than this no table is readable; the terminal wraps it then.
const WIDTH_MIN: u16 = 60;
/// Text in a narrower column is unreadable; every column gives way then.
const WRAPPED_MIN: usize = 16;
/// What a table takes where the width of the window is not known.
const WIDTH_DEFAULT: u16 = 80;

impl Out {
    /// As the flags, the environment and the terminal say.
    #[must_use]
    pub fn new(format: Format, no_colour: NoColour, quiet: bool) -> Self {
        let stdout_is_terminal = std::io::stdout().is_terminal();
        let plain_terminal = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let asked_off = no_colour == NoColour::Asked || set("NO_COLOR") || plain_terminal;
        Out {
            format,
            colour: stdout_is_terminal && !asked_off,
            quiet,
            width: if stdout_is_terminal { window_width() } else { WIDTH_DEFAULT },
            live: std::io::stderr().is_terminal() && !quiet && !plain_terminal,
        }
    }

    /// Says something to the person; silent with `-q`. A closed stderr is not worth failing for.
    pub fn say(&self, text: &str) {
        if !self.quiet {
            talk(text);
        }
    }

    /// Prints text that is data.
    pub fn data(&self, text: &str) -> Result<(), ExpectedError> {
        write_stdout(text.as_bytes())
    }

    /// Prints JSON, indented, with a newline at the end.
    pub fn json<T: Serialize>(&self, value: &T) -> Result<(), ExpectedError> {
        let mut text = serde_json::to_string_pretty(value)
            .map_err(|e| ExpectedError::Internal(format!("cannot print JSON: {e}")))?;
        text.push('\n');
        write_stdout(text.as_bytes())
    }

    /// Prints one JSON value in a line.
    pub fn json_line<T: Serialize>(&self, value: &T) -> Result<(), ExpectedError> {
        let mut text = serde_json::to_string(value)
            .map_err(|e| ExpectedError::Internal(format!("cannot print JSON: {e}")))?;
        text.push('\n');
        write_stdout(text.as_bytes())
    }

    /// Prints a grid as table or CSV, or `json` as JSON.
    pub fn grid<T: Serialize>(&self, grid: &Grid, json: impl FnOnce() -> T) -> Result<(), ExpectedError> {
        match self.format {
            Format::Json => self.json(&json()),
            Format::Csv => self.data(&grid.csv()?),
            Format::Table | Format::Wide => self.data(&grid.table(self)),
        }
    }
}

/// Whether `--no-color` was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoColour {
    Asked,
    NotAsked,
}

impl Cell {
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Cell { text: text.into(), exact: None, tone: Tone::Plain }
    }

    /// With another value for CSV than for people.
    #[must_use]
    pub fn exact(mut self, value: impl ToString) -> Self {
        self.exact = Some(value.to_string());
        self
    }

    /// At most `max` characters for people.
    #[must_use]
    pub fn shortened(mut self, max: usize) -> Self {
        if max < usize::MAX {
            self.text = short(&self.text, max);
        }
        self
    }

    #[must_use]
    pub fn tone(mut self, tone: Tone) -> Self {
        self.tone = tone;
        self
    }
}

impl Column {
    #[must_use]
    pub const fn left(title: &'static str, key: &'static str) -> Self {
        Column { title, key, shown: Shown::Always, align: Align::Left, fit: Fit::Whole }
    }

    #[must_use]
    pub const fn right(title: &'static str, key: &'static str) -> Self {
        Column { title, key, shown: Shown::Always, align: Align::Right, fit: Fit::Whole }
    }

    /// Takes the room that the other columns leave.
    #[must_use]
    pub const fn wraps(self) -> Self {
        Column { fit: Fit::Wraps, ..self }
    }

    /// Only with `-o wide` and in CSV.
    #[must_use]
    pub const fn wide(self) -> Self {
        Column { shown: Shown::Wide, ..self }
    }
}

impl Grid {
    #[must_use]
    pub fn new(columns: &[Column]) -> Self {
        Grid { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row with one cell per column.
    pub fn row(&mut self, cells: Vec<Cell>) {
        debug_assert_eq!(cells.len(), self.columns.len(), "a row has a cell for each column");
        self.rows.push(cells);
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table for people, each line without spaces at its end.
    #[must_use]
    pub fn table(&self, out: &Out) -> String {
        let wide = out.format == Format::Wide;
        let shown: Vec<usize> =
            (0..self.columns.len()).filter(|i| wide || self.columns[*i].shown == Shown::Always).collect();
        let mut table = Table::new();
        table.load_preset(comfy_table::presets::NOTHING);
        if wide {
            table.set_content_arrangement(ContentArrangement::Disabled);
        } else {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(out.width.max(WIDTH_MIN));
        }
        if out.colour {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        table.set_header(shown.iter().map(|i| self.columns[*i].title));
        for row in &self.rows {
            table.add_row(shown.iter().map(|i| laid_out(&row[*i])));
        }
        let keep_whole = !wide && self.leaves_room(&shown, usize::from(out.width.max(WIDTH_MIN)));
        for (place, index) in shown.iter().enumerate() {
            if let Some(column) = table.column_mut(place) {
                column.set_padding(if place == 0 { (0, 1) } else { (1, 1) });
                if keep_whole && self.columns[*index].fit == Fit::Whole {
                    column.set_constraint(ColumnConstraint::ContentWidth);
                }
                if self.columns[*index].align == Align::Right {
                    column.set_cell_alignment(CellAlignment::Right);
                }
            }
        }
        let mut text = String::new();
        for line in table.lines() {
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    /// Whether the table has no cell that is broken into lines.
    #[must_use]
    pub fn is_one_line_a_row(&self, out: &Out) -> bool {
        self.table(out).lines().count() <= self.rows.len() + 1
    }

    /// Whether the columns that stay whole leave enough for one that wraps.
    fn leaves_room(&self, shown: &[usize], width: usize) -> bool {
        let content = |index: usize| {
            let cells = self.rows.iter().map(|row| plain(&row[index].text).chars().count());
            cells.chain([self.columns[index].title.chars().count()]).max().unwrap_or(0)
        };
        let wraps = |index: &&usize| self.columns[**index].fit == Fit::Wraps;
        let whole: usize = shown.iter().filter(|i| !wraps(i)).map(|i| content(*i)).sum();
        // Two spaces for each column, one of them at the end of the line.
        shown.iter().any(|i| wraps(&i)) && whole + 2 * shown.len() + WRAPPED_MIN <= width
    }

    fn csv(&self) -> Result<String, ExpectedError> {
        let failed = |e: csv::Error| ExpectedError::Internal(format!("cannot print CSV: {e}"));
        let mut writer = csv::Writer::from_writer(Vec::new());
        writer.write_record(self.columns.iter().map(|c| c.key)).map_err(failed)?;
        for row in &self.rows {
            let fields = row.iter().map(|cell| cell.exact.as_deref().unwrap_or(&cell.text));
            writer.write_record(fields).map_err(failed)?;
        }
        let bytes =
            writer.into_inner().map_err(|e| ExpectedError::Internal(format!("cannot print CSV: {e}")))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// `text` in one line without control characters, escape sequences, or characters that reorder what follows.
#[must_use]
pub fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            // A sequence goes as a whole, or its tail ("[31m") would stay behind.
            '\u{1b}' => skip_sequence(&mut chars),
            '\n' | '\r' | '\t' => out.push(' '),
            c if c.is_control() || reorders(c) => {}
            c => out.push(c),
        }
    }
    out
}

/// `plain` and at most `max` characters, cut with an ellipsis.
#[must_use]
pub fn short(text: &str, max: usize) -> String {
    let text = plain(text);
    if text.chars().count() <= max {
        return text;
    }
    text.chars().take(max.saturating_sub(1)).chain(['…']).collect()
}

/// Writes to stderr. Nobody can be told if that fails.
pub fn talk(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = writeln!(stderr, "{text}");
}

/// Writes data to stdout.
pub fn write_stdout(bytes: &[u8]) -> Result<(), ExpectedError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|e| ExpectedError::output(&e))
}

fn laid_out(cell: &Cell) -> comfy_table::Cell {
    use comfy_table::Color;
    let laid = comfy_table::Cell::new(plain(&cell.text));
    match cell.tone {
        Tone::Plain => laid,
        Tone::Good => laid.fg(Color::Green),
        Tone::Busy => laid.fg(Color::Cyan),
        Tone::Waiting => laid.fg(Color::Yellow),
        Tone::Bad => laid.fg(Color::Red),
    }
}

/// Leaves out the rest of an escape sequence whose first character was just read.
fn skip_sequence(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    match chars.peek() {
        Some('[') => {
            chars.next();
            for c in chars.by_ref() {
                if ('\u{40}'..='\u{7e}').contains(&c) {
                    break;
                }
            }
        }
        // Titles and links end with BEL or ESC \.
        Some(']' | 'P' | '_' | '^' | 'X') => {
            while let Some(c) = chars.next() {
                if c == '\u{7}' {
                    break;
                }
                if c == '\u{1b}' {
                    chars.next_if_eq(&'\\');
                    break;
                }
            }
        }
        Some(_) => {
            chars.next();
        }
        None => {}
    }
}

/// Marks that turn the direction of text: a name with one could make a line read as another.
fn reorders(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}

fn window_width() -> u16 {
    Table::new().width().unwrap_or(WIDTH_DEFAULT)
}

#[cfg(test)]
pub mod test {
    use super::*;

    /// A run without a terminal.
    pub fn out(format: Format) -> Out {
        Out { format, colour: false, quiet: false, width: WIDTH_DEFAULT, live: false }
    }

    #[test]
    fn escape_sequences_and_control_characters_of_users_never_reach_a_terminal() {
        for (text, shown) in [
            ("train", "train"),
            ("a\u{1b}[31mred\u{1b}[0m", "ared"),
            ("a\u{1b}]0;title\u{7}b", "ab"),
            ("a\u{1b}]8;;http://x\u{1b}\\link", "alink"),
            ("two\nlines\tand tab", "two lines and tab"),
            ("bell\u{7}back\u{8}", "bellback"),
            ("c1\u{9b}31m", "c131m"),
            ("rtl\u{202e}txt", "rtltxt"),
            ("emoji 🚀 stays", "emoji 🚀 stays"),
            ("cut\u{1b}", "cut"),
            ("cut\u{1b}[", "cut"),
        ] {
            assert_eq!(plain(text), shown, "{text:?}");
        }
    }

    #[test]
    fn a_table_fits_its_width_and_colours_appear_only_where_asked() {
        let mut grid = Grid::new(&[
            Column::right("JOB", "job_id"),
            Column::left("WHY", "reason"),
            Column::left("UUID", "uuid").wide(),
        ]);
        let why =
            "all 4 matching pools refused lately (last: insufficient capacity), and the next try comes soon";
        grid.row(vec![Cell::new("7"), Cell::new(why).tone(Tone::Waiting), Cell::new("u")]);
        let table = grid.table(&out(Format::Table));
        assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
        assert!(!table.contains("UUID") && !table.contains('\u{1b}'), "{table}");
        let wide = grid.table(&out(Format::Wide));
        assert_eq!(wide.lines().count(), 2, "{wide}");
        assert!(wide.contains("UUID"));
        let coloured = grid.table(&Out { colour: true, ..out(Format::Table) });
        assert!(coloured.contains("\u{1b}["), "{coloured:?}");
    }

    #[test]
    fn csv_has_every_column_and_exact_values() {
        let mut grid = Grid::new(&[Column::left("NAME", "name"), Column::right("COST", "billed_usd").wide()]);
        grid.row(vec![Cell::new("a,\"b\""), Cell::new("$0.97").exact("0.973100000")]);
        assert_eq!(grid.csv().unwrap(), "name,billed_usd\n\"a,\"\"b\"\"\",0.973100000\n");
    }

    #[test]
    fn long_names_are_cut_by_characters() {
        assert_eq!(short("ééééé", 4), "ééé…");
        assert_eq!(short("four", 4), "four");
    }
}
