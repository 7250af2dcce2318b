export declare const ROOT: string;
export declare const PYTHON: string;
