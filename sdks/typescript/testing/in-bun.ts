/** Before each test file: what is meant to run in Bun does not run in something else unnoticed. */
if (process.versions["bun"] === undefined) throw new Error(`this is ${process.execPath}, not Bun`);
